"""The table for Flow-Factory's configuration, a YAML file."""

from __future__ import annotations

from typing import Any

from flowcorr.config.families import find_family
from flowcorr.translate import flow_factory_values as there
from flowcorr.translate import rewards
from flowcorr.translate.families import family_of, untranslated
from flowcorr.translate.flow_factory_values import ABSENT, MODELS, REQUIRED, SDE_TYPES, WHOLE_RUN
from flowcorr.translate.table import Given, Left, Row, Table, dtype_of

_MOST_STEPS = 1000
_ONLY: dict[str, tuple[Any, ...]] = {
    "train.advantage_aggregation": ("sum", "gdpo"),
    "train.ema_decay_schedule": ("power", "constant"),
    "model.finetune_type": ("lora", "full"),
    "model.target_components": ("transformer", ["transformer"]),
    "model.resume_type": (None, "lora"),
    "scheduler.dynamics_type": tuple(SDE_TYPES),
    "data.sampler_type": ("auto", "group_contiguous", "distributed_k_repeat"),
}
"""Values that have an equivalent."""


def _refuse(get: Given) -> str:
    """Why flowcorr cannot run a configuration, or an empty string."""
    trainer, kind = get("train.trainer_type", str), get("model.model_type", str).lower()
    if trainer.lower() == "grpo-guard":
        return "train.trainer_type=grpo-guard weighs no step by its length, as flowcorr's grpo_guard does"
    if trainer.lower() != "grpo":
        return f"train.trainer_type={trainer} has no equivalent here; flowcorr translates grpo"
    if reason := untranslated(kind):
        return f"model.model_type={kind} {reason}"
    if kind not in MODELS:
        return f"model.model_type={kind} belongs to no family that flowcorr knows: {', '.join(MODELS)}"
    path = get("model.model_name_or_path", str)
    named = family_of(path)
    if named is not None and named != there.family(get):
        return f"model.model_name_or_path={path} is no model of model.model_type={kind}"
    for name in ("train_steps", "num_train_steps"):
        if get(f"scheduler.{name}") is not None:
            return (
                f"scheduler.{name}={get(f'scheduler.{name}')} is of Flow-Factory before February 2026, which had other "
                f"defaults; write scheduler.{name.replace('train', 'sde')}, and train.advantage_aggregation: sum"
            )
    for key, values in _ONLY.items():
        if get(key) not in values:
            known = ", ".join(str(value) for value in values if value)
            return f"{key}={get(key)} has no equivalent here; flowcorr translates {known}"
    if get("train.kl_beta") > 0:
        return (
            f"train.kl_beta={get('train.kl_beta')} weighs the distance of velocities or latents, but flowcorr an exact "
            "KL; set it to 0, and actor.kl_coef in the recipe"
        )
    return _refuse_weights(get) or _refuse_numbers(get)


def _refuse_weights(get: Given) -> str:
    if there.adapted(get):
        if get("model.lora_rank") < 1:
            return f"model.lora_rank={get('model.lora_rank')} makes no adapter; use at least 1, or finetune_type=full"
        if get("model.target_modules") == "all":
            return "model.target_modules=all adapts every linear layer; name the layers in a list"
        return ""
    if get("model.resume_path") is not None:
        return "model.resume_path is of a run that trains all weights; start from its model instead, as model.path"
    if there.weights_dtype(get) != dtype_of(get, "mixed_precision") and not there.computes_in_autocast(get):
        return (
            f"model.master_weight_dtype={get('model.master_weight_dtype')} with mixed_precision="
            f"{get('mixed_precision')} has no equivalent here; flowcorr casts float32 to bfloat16"
        )
    return ""


def _refuse_numbers(get: Given) -> str:
    if get("num_processes", int | None) is None:
        return "num_processes is not set, which decides the prompts per step; give it"
    whole = ("group_size", "per_device_batch_size", "unique_sample_num_per_epoch", "gradient_step_per_epoch")
    for key in ("num_processes", *(f"train.{name}" for name in (*whole, "num_inner_epochs"))):
        if get(key, int) < 1:
            return f"{key}={get(key)} must be at least 1"
    if not 2 <= get("train.num_inference_steps") <= _MOST_STEPS:
        return f"train.num_inference_steps={get('train.num_inference_steps')} must be 2 to {_MOST_STEPS}"
    if not 0 <= get("train.ema_decay") < 1:
        return f"train.ema_decay={get('train.ema_decay')} must be in [0, 1)"
    if get("train.group_size") < 2:
        return f"train.group_size={get('train.group_size')} gives an image no other to be compared with; use 2 or more"
    steps, number = there.sde_steps(get), get("scheduler.num_sde_steps", int | None)
    if not steps or steps != list(range(steps[0], steps[-1] + 1)):
        return f"scheduler.sde_steps={get('scheduler.sde_steps')} has gaps, but flowcorr draws from a range of steps"
    if not (number is None or (type(number) is int and number >= 1)):
        return f"scheduler.num_sde_steps={number!r} must be a whole number of at least 1, or null"
    accumulated = get("train.gradient_accumulation_steps")
    if accumulated != "auto" and (
        type(accumulated) is not int
        or accumulated < 1
        or accumulated % there.window_size(get)
        or there.batches(get) * there.window_size(get) % accumulated
    ):
        return (
            f"train.gradient_accumulation_steps={accumulated} splits a batch's SDE steps or an epoch; use "
            f"a multiple of {there.window_size(get)} that divides {there.batches(get) * there.window_size(get)}"
        )
    if there.updates(get) > there.prompts(get):
        return (
            f"{there.updates(get)} updates of an epoch have {there.prompts(get)} prompts, but flowcorr never splits a "
            "group; use fewer updates"
        )
    return ""


_ALL_PROMPTS = 100_000


def _guidance(key: str) -> Row:
    return Row(
        "train.guidance_scale",
        f"sampling.{key}",
        there.guidance,
        "of Z-Image one more than its pipeline counts",
        when=lambda get: find_family(there.family(get)).guidance_key == key,
    )


def _total_steps(get: Given) -> int:
    epochs = get("train.max_epochs", int | None)
    return WHOLE_RUN if epochs is None or epochs < 0 else epochs


ROWS = (
    Row("model.model_name_or_path", "model.path"),
    Row("model.model_type", "model.family", there.family),
    Row(("mixed_precision", "model.master_weight_dtype"), "model.dtype", there.weights_dtype),
    Row("model.attn_backend", "model.attention"),
    Row(
        (),
        "model.max_sequence_length",
        there.tokens,
        when=lambda get: not there.reads(get, "train.max_sequence_length"),
    ),
    Row(
        "train.max_sequence_length",
        "model.max_sequence_length",
        there.tokens,
        when=lambda get: there.reads(get, "train.max_sequence_length"),
    ),
    Row(
        ("model.lora_rank", "model.finetune_type"),
        "model.lora.rank",
        lambda get: get("model.lora_rank"),
        when=there.adapted,
    ),
    Row(
        ("model.finetune_type", "model.target_modules"),
        "model.lora.rank",
        lambda get: 0,
        "there only weights whose names contain an entry of target_modules, unless it is all; here all weights",
        when=lambda get: not there.adapted(get),
    ),
    Row(
        "model.lora_alpha",
        "model.lora.alpha",
        lambda get: get("model.lora_alpha", float | None) or 2.0 * get("model.lora_rank"),
        when=there.adapted,
    ),
    Row(
        ("model.target_modules", "model.target_components"),
        "model.lora.targets",
        there.targets,
        "default of Qwen-Image: without img_mlp.net.2.proj and txt_mlp.net.2.proj, which name no layer",
    ),
    Row(
        "model.master_weight_dtype",
        "model.lora.dtype",
        lambda get: dtype_of(get, "model.master_weight_dtype"),
        when=there.adapted,
    ),
    Row("model.resume_path", "model.lora.warm_start"),
    Row(
        "scheduler.dynamics_type", "sampling.sde_type", lambda get: SDE_TYPES[get("scheduler.dynamics_type")]
    ),
    Row(
        (),
        "sampling.cps_unscaled",
        lambda get: True,
        "its cps log-probs lack 1 / (2 s^2)",
        when=lambda get: get("scheduler.dynamics_type") == "CPS",
    ),
    Row("scheduler.noise_level", "sampling.noise_level"),
    Row("train.num_inference_steps", "sampling.num_inference_steps", None, there.sigmas_note),
    Row("scheduler.num_sde_steps", "sampling.sde_window_size", there.window_size),
    Row(
        "scheduler.sde_steps",
        "sampling.sde_window_range",
        there.window_range,
        "it draws once an epoch for all samples; here for each prompt",
    ),
    Row((), "sampling.sde_window_layout", lambda get: "scattered", "any of the steps", when=there.draws),
    _guidance("guidance_scale"),
    _guidance("true_cfg_scale"),
    Row(
        "train.negative_prompt",
        "sampling.negative_prompt",
        lambda get: get("train.negative_prompt", str | None),
        when=lambda get: there.reads(get, "train.negative_prompt") and there.guidance(get) > 1,
    ),
    Row(("train.resolution", "train.height"), "sampling.height", lambda get: there.size(get, "train", 0)),
    Row("train.resolution", "sampling.width", lambda get: there.size(get, "train", 1)),
    Row("mixed_precision", "rollout.dtype", lambda get: dtype_of(get, "mixed_precision")),
    Row(
        (
            "train.unique_sample_num_per_epoch",
            "num_processes",
            "data.sampler_type",
            "train.per_device_batch_size",
            "train.gradient_step_per_epoch",
        ),
        "rollout.prompts_per_step",
        there.prompts,
        "rounded up there too, until batches, processes and updates come out even",
    ),
    Row("train.group_size", "rollout.n"),
    Row("train.per_device_batch_size", "rollout.batch_size"),
    Row((), "rollout.same_initial_noise", lambda get: False),
    Row("train.trainer_type", "actor.loss_mode", lambda get: "flow_grpo"),
    Row("train.clip_range", "actor.clip_ratio", lambda get: there.bound(get, "train.clip_range")),
    Row("train.adv_clip_range", "actor.adv_clip_max", lambda get: there.bound(get, "train.adv_clip_range")),
    Row("train.kl_beta", "actor.kl_coef"),
    Row("train.learning_rate", "actor.lr"),
    Row("train.adam_betas", "actor.betas"),
    Row("train.adam_epsilon", "actor.eps"),
    Row("train.adam_weight_decay", "actor.weight_decay"),
    Row("train.max_grad_norm", "actor.grad_clip"),
    Row("train.num_inner_epochs", "actor.epochs"),
    Row(
        ("train.gradient_step_per_epoch", "train.gradient_accumulation_steps"),
        "actor.mini_batches",
        there.updates,
        "updates of an epoch; groups are never split here",
    ),
    Row("train.per_device_batch_size", "actor.micro_batch_size"),
    Row("mixed_precision", "actor.autocast", there.computes_in_autocast),
    Row("train.enable_gradient_checkpointing", "actor.gradient_checkpointing"),
    Row(
        ("train.ema_decay", "train.ema_update_interval", "train.ema_decay_schedule"),
        "actor.ema",
        there.ema,
        "of every few epochs there, of one update here",
    ),
    Row(
        ("train.global_std", "train.advantage_aggregation"),
        "algorithm.advantage_std",
        lambda get: (
            "global" if get("train.global_std") or get("train.advantage_aggregation") == "gdpo" else "group"
        ),
        "gdpo divides each reward by its group's std, and their sum by that of all",
    ),
    Row((), "algorithm.rollout_correction.bypass_mode", lambda get: True, "old log-probs are the rollout's"),
    Row(
        "rewards",
        "reward.terms",
        lambda get: rewards.terms(
            there.reward_functions(get),
            normalize="group" if get("train.advantage_aggregation") == "gdpo" else "none",
        ),
        lambda get: rewards.note(there.reward_functions(get)),
    ),
    Row(
        "eval_rewards",
        "reward.gold",
        lambda get: rewards.terms(there.gold_functions(get)) or None,
        lambda get: rewards.note(there.gold_functions(get)),
    ),
    Row(
        (),
        "reward.gold_every",
        lambda get: "evaluation",
        "only its evaluations score them",
        when=there.gold_functions,
    ),
    Row(
        "data.dataset_dir",
        "data.path",
        lambda get: there.prompts_file(get, "train"),
        there.references_note,
    ),
    Row("data.dataset_dir", "data.heldout_path", lambda get: there.prompts_file(get, "test")),
    Row((), "data.num_heldout", lambda get: _ALL_PROMPTS, "all of them are evaluated"),
    Row(
        "train.max_epochs",
        "trainer.total_steps",
        _total_steps,
        "without max_epochs it trains until it is stopped",
    ),
    Row("train.seed", "trainer.seed"),
    Row("eval.eval_freq", "trainer.eval_every", None, "epochs"),
    Row("eval.num_inference_steps", "trainer.eval_num_inference_steps", None, there.sigmas_note),
    Row(("eval.resolution", "eval.height"), "trainer.eval_height", lambda get: there.size(get, "eval", 0)),
    Row("eval.resolution", "trainer.eval_width", lambda get: there.size(get, "eval", 1)),
    Row(
        "log.save_freq",
        "trainer.save_every",
        lambda get: get("log.save_freq") if get("log.save_freq") > 0 else _total_steps(get),
        "epochs; 0 there is never, here at least the last step",
    ),
    Row(("log.logging_backend", "logging_backend"), "trainer.trackers", there.trackers, there.trackers_note),
)

LEFT = (
    Left("*.width", "Flow-Factory uses the width of the resolution, whatever it says"),
    Left("train.kl_type", "without kl_beta there is no KL", ("v-based", "x-based")),
    Left("scheduler.seed", "windows are drawn from trainer.seed", (42,)),
    Left("data.max_dataset_size", "shorten the file of prompts"),
    Left("eval.guidance_scale", "evaluations use the guidance of sampling", like="train.guidance_scale"),
    Left(
        "eval.negative_prompt",
        "evaluations use the negative prompt of sampling",
        like="train.negative_prompt",
    ),
    Left(
        "eval.max_sequence_length",
        "evaluations read prompts as sampling does",
        like="train.max_sequence_length",
    ),
    Left("eval.seed", "evaluations draw their noise from trainer.seed", like="train.seed"),
    Left(
        "*.condition_image_size",
        "reference images are fitted to the height and width of sampling",
        when=there.takes_references,
    ),
    Left("data.image_dir", "reference images are found by their paths from the file of prompts"),
    Left("train.latent_storage_dtype", "latents are stored in float32", ("float32", "fp32")),
    Left("config_file", "how it shards; see actor.fsdp"),
)
APART = (
    *(
        f"data.{key}"
        for key in (
            *("cache_dir", "preprocessing_batch_size", "dataloader_num_workers"),
            *("enable_preprocess", "force_reprocess", "preprocess_parallelism"),
        )
    ),
    *(f"log.{key}" for key in ("run_name", "project", "save_dir", "save_model_only", "verbose")),
    "eval.per_device_batch_size",
    *(
        f"train.{key}"
        for key in ("ref_param_device", "ema_device", "offload_samples_to_cpu", "num_batches_per_epoch")
    ),
    *(
        "launcher",
        "project",
        "run_name",
        "main_process_port",
        "num_machines",
        "machine_rank",
        "main_process_ip",
    ),
)

DIFFERENCES = (
    "Flow-Factory's advantages use the population std, which is sqrt((n - 1) / n) of the std here",
    "Flow-Factory stores latents in float16 unless train.latent_storage_dtype says otherwise; here they are float32",
    "Flow-Factory begins its average with decays below its own, (1 + n) / (10 + n) at epoch n; here it is one from the "
    "start",
    "Flow-Factory saves and evaluates before a step; here after it",
)

TABLE = Table(
    name="Flow-Factory",
    required=REQUIRED,
    absent=ABSENT,
    only={},
    refuse=_refuse,
    rows=ROWS,
    left=LEFT,
    apart=APART,
    differences=DIFFERENCES,
)
