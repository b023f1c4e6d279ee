"""The table for Flow-Factory's configuration, a YAML file."""

from __future__ import annotations

from typing import Any

from flowcorr.config.families import find_family
from flowcorr.translate import flow_factory_values as there
from flowcorr.translate import rewards
from flowcorr.translate.families import TRANSLATED, family_of, untranslated
from flowcorr.translate.flow_factory_values import MODELS, TEXT_KEYS
from flowcorr.translate.table import (
    ALL_PROMPTS,
    TRACKERS,
    WHOLE_RUN,
    Given,
    Left,
    Row,
    Table,
    decay_of_one,
    dtype_of,
    too_small,
    under,
)

_MOST_STEPS = 1000
_SDE_TYPES = {"Flow-SDE": "sde", "Dance-SDE": "dance_sde", "CPS": "cps"}
_ONLY: dict[str, tuple[Any, ...]] = {
    "train.advantage_aggregation": ("sum", "gdpo"),
    "train.ema_decay_schedule": ("power", "constant"),
    "model.finetune_type": ("lora", "full"),
    "model.target_components": ("transformer", ["transformer"]),
    "model.resume_type": (None, "lora"),
    "scheduler.dynamics_type": tuple(_SDE_TYPES),
    "data.sampler_type": ("auto", "group_contiguous", "distributed_k_repeat"),
}
_ABSENT: dict[str, Any] = {
    "num_processes": None,
    "mixed_precision": "bf16",
    "rewards": None,
    "eval_rewards": None,
    "data.dataset_dir": "data",
    "data.sampler_type": "auto",
    "model.model_name_or_path": "black-forest-labs/FLUX.1-dev",
    "model.model_type": "flux1",
    "model.finetune_type": "full",
    "model.master_weight_dtype": "bfloat16",
    "model.target_components": "transformer",
    "model.target_modules": "all",
    "model.lora_rank": 8,
    "model.lora_alpha": None,
    "model.resume_path": None,
    "model.resume_type": None,
    "model.attn_backend": None,
    "train.trainer_type": "grpo",
    "train.resolution": 512,
    "train.height": None,
    "train.max_epochs": None,
    "train.per_device_batch_size": 1,
    "train.gradient_step_per_epoch": 2,
    "train.gradient_accumulation_steps": "auto",
    "train.max_grad_norm": 1.0,
    "train.num_inner_epochs": 1,
    "train.group_size": 1,
    "train.unique_sample_num_per_epoch": 8,
    "train.num_inference_steps": 10,
    "train.guidance_scale": 3.5,
    "train.negative_prompt": None,
    "train.max_sequence_length": None,
    "train.seed": 42,
    "train.learning_rate": 1e-5,
    "train.adam_weight_decay": 1e-4,
    "train.adam_betas": [0.9, 0.999],
    "train.adam_epsilon": 1e-8,
    "train.enable_gradient_checkpointing": False,
    "train.ema_decay": 0.995,
    "train.ema_update_interval": 10,
    "train.ema_decay_schedule": "power",
    "train.global_std": True,
    "train.advantage_aggregation": "gdpo",
    "train.clip_range": 1e-4,
    "train.adv_clip_range": 5.0,
    "train.kl_beta": 0.0,
    "scheduler.dynamics_type": "Flow-SDE",
    "scheduler.noise_level": 0.7,
    "scheduler.num_sde_steps": 1,
    "scheduler.sde_steps": None,
    "scheduler.num_train_steps": None,
    "scheduler.train_steps": None,
    "eval.resolution": 1024,
    "eval.height": None,
    "eval.num_inference_steps": 30,
    "eval.guidance_scale": 3.5,
    "eval.eval_freq": 10,
    "log.save_freq": 10,
    "log.logging_backend": None,
    "logging_backend": None,
}
"""The values of keys that a file may lack, in Flow-Factory since February 2026."""


def _foreign(get: Given) -> str:
    """Why flowcorr has no such trainer or model, or an empty string."""
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
    if named is not None and named != MODELS[kind].family:
        return f"model.model_name_or_path={path} is no model of model.model_type={kind}"
    return ""


def _refuse(get: Given) -> str:
    """Why flowcorr cannot run a configuration, or an empty string."""
    for name in ("train_steps", "num_train_steps"):
        if get(f"scheduler.{name}") is not None:
            return (
                f"scheduler.{name}={get(f'scheduler.{name}')} is of Flow-Factory before February 2026, which had other "
                f"defaults; write scheduler.{name.replace('train', 'sde')}, and train.advantage_aggregation: sum"
            )
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
    counts = under(
        "train", "per_device_batch_size unique_sample_num_per_epoch gradient_step_per_epoch num_inner_epochs"
    )
    if reason := too_small(get, ("num_processes", *counts), "train.group_size"):
        return reason
    if not 2 <= get("train.num_inference_steps") <= _MOST_STEPS:
        return f"train.num_inference_steps={get('train.num_inference_steps')} must be 2 to {_MOST_STEPS}"
    if not 0 <= get("train.ema_decay") < 1:
        return f"train.ema_decay={get('train.ema_decay')} must be in [0, 1)"
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


def _sigmas_note(family: str) -> str:
    """A note on the difference between Flow-Factory's sigmas and ours for N steps."""
    if family != "sd3":
        return ""
    return (
        "its N sigmas are linspace(1, 1 / N, N), shifted; here those of diffusers' SD3 pipeline, which end lower: at "
        "N = 10, 0.009 instead of 0.25"
    )


def _rows(get: Given) -> dict[str, str | Row]:
    model, adapted = there.model_of(get), there.adapted(get)
    family, dtype = model.family, dtype_of(get, "mixed_precision")
    reads_length, reads_negative = (
        "train.max_sequence_length" in model.reads,
        "train.negative_prompt" in model.reads,
    )
    length = get("train.max_sequence_length", int | None) if reads_length else None
    sde_type = _SDE_TYPES[get("scheduler.dynamics_type")]
    sde_steps, window_size = there.sde_steps(get), there.window_size(get)
    guidance = get("train.guidance_scale") + TRANSLATED[family].guidance_offset
    updates, aggregation = there.updates(get), get("train.advantage_aggregation")
    decay, interval = get("train.ema_decay"), get("train.ema_update_interval")
    functions, gold = there.reward_functions(get), there.gold_functions(get)
    epochs = get("train.max_epochs", int | None)
    total_steps = WHOLE_RUN if epochs is None or epochs < 0 else epochs
    tracker = get("log.logging_backend")
    tracker = get("logging_backend") if tracker is None else tracker
    return {
        "model.path": "model.model_name_or_path",
        "model.family": Row("model.model_type", family),
        "model.dtype": Row(("mixed_precision", "model.master_weight_dtype"), there.weights_dtype(get)),
        "model.attention": "model.attn_backend",
        "model.max_sequence_length": Row(
            "train.max_sequence_length" if reads_length else (), model.tokens if length is None else length
        ),
        "model.lora.rank": Row(("model.lora_rank", "model.finetune_type"), get("model.lora_rank"))
        if adapted
        else Row(
            ("model.finetune_type", "model.target_modules"),
            0,
            "there only weights whose names contain an entry of target_modules, unless it is all; here all weights",
        ),
        "model.lora.alpha": Row(
            "model.lora_alpha",
            get("model.lora_alpha", float | None) or 2.0 * get("model.lora_rank") if adapted else None,
        ),
        "model.lora.targets": Row(
            ("model.target_modules", "model.target_components"),
            there.targets(get),
            "default of Qwen-Image: without img_mlp.net.2.proj and txt_mlp.net.2.proj, which name no layer",
        ),
        "model.lora.dtype": Row(
            "model.master_weight_dtype", dtype_of(get, "model.master_weight_dtype") if adapted else None
        ),
        "model.lora.warm_start": "model.resume_path",
        "sampling.sde_type": Row("scheduler.dynamics_type", sde_type),
        "sampling.cps_unscaled": Row((), sde_type == "cps", "its cps log-probs lack 1 / (2 s^2)"),
        "sampling.noise_level": "scheduler.noise_level",
        "sampling.num_inference_steps": Row(
            "train.num_inference_steps", get("train.num_inference_steps"), _sigmas_note(family)
        ),
        "sampling.sde_window_size": Row("scheduler.num_sde_steps", window_size),
        "sampling.sde_window_range": Row(
            "scheduler.sde_steps",
            [sde_steps[0], sde_steps[-1] + 1],
            "it draws once an epoch for all samples; here for each prompt",
        ),
        # A window of several steps, and fewer than there are, can take places that are not consecutive.
        "sampling.sde_window_layout": Row(
            (), "scattered" if 1 < window_size < len(sde_steps) else "consecutive", "any of the steps"
        ),
        f"sampling.{find_family(family).guidance_key}": Row(
            "train.guidance_scale", guidance, "of Z-Image one more than its pipeline counts"
        ),
        "sampling.negative_prompt": Row(
            "train.negative_prompt",
            get("train.negative_prompt", str | None) if reads_negative and guidance > 1 else None,
        ),
        "sampling.height": Row(("train.resolution", "train.height"), there.size(get, "train", 0)),
        "sampling.width": Row("train.resolution", there.size(get, "train", 1)),
        "rollout.dtype": Row("mixed_precision", dtype),
        "rollout.prompts_per_step": Row(
            (
                "train.unique_sample_num_per_epoch",
                *("num_processes", "data.sampler_type"),
                *("train.per_device_batch_size", "train.gradient_step_per_epoch"),
            ),
            there.prompts(get),
            "rounded up there too, until batches, processes and updates come out even",
        ),
        "rollout.n": "train.group_size",
        "rollout.batch_size": "train.per_device_batch_size",
        "rollout.same_initial_noise": Row((), False),
        "actor.loss_mode": Row("train.trainer_type", "flow_grpo"),
        "actor.clip_ratio": Row("train.clip_range", there.bound(get, "train.clip_range")),
        "actor.adv_clip_max": Row("train.adv_clip_range", there.bound(get, "train.adv_clip_range")),
        "actor.kl_coef": "train.kl_beta",
        "actor.lr": "train.learning_rate",
        "actor.betas": "train.adam_betas",
        "actor.eps": "train.adam_epsilon",
        "actor.weight_decay": "train.adam_weight_decay",
        "actor.grad_clip": "train.max_grad_norm",
        "actor.epochs": "train.num_inner_epochs",
        "actor.mini_batches": Row(
            ("train.gradient_step_per_epoch", "train.gradient_accumulation_steps"),
            updates,
            "updates of an epoch; groups are never split here",
        ),
        "actor.micro_batch_size": "train.per_device_batch_size",
        "actor.autocast": Row("mixed_precision", there.computes_in_autocast(get)),
        "actor.gradient_checkpointing": "train.enable_gradient_checkpointing",
        "actor.ema": Row(
            ("train.ema_decay", "train.ema_update_interval", "train.ema_decay_schedule"),
            None
            if decay == 0 or interval < 1
            else decay_of_one(decay, interval * updates * get("train.num_inner_epochs")),
            "of every few epochs there, of one update here",
        ),
        "algorithm.advantage_std": Row(
            ("train.global_std", "train.advantage_aggregation"),
            "global" if get("train.global_std") or aggregation == "gdpo" else "group",
            "gdpo divides each reward by its group's std, and their sum by that of all",
        ),
        "algorithm.rollout_correction.bypass_mode": Row((), True, "old log-probs are the rollout's"),
        "reward.terms": Row(
            "rewards",
            rewards.terms(functions, normalize="group" if aggregation == "gdpo" else "none"),
            rewards.note(functions),
        ),
        "reward.gold": Row("eval_rewards", rewards.terms(gold) or None, rewards.note(gold)),
        "reward.gold_every": Row((), "evaluation" if gold else "step", "only its evaluations score them"),
        "data.path": Row("data.dataset_dir", there.prompts_file(get, "train"), there.references_note(get)),
        "data.heldout_path": Row("data.dataset_dir", there.prompts_file(get, "test")),
        "data.num_heldout": Row((), ALL_PROMPTS, "all of them are evaluated"),
        "trainer.total_steps": Row(
            "train.max_epochs", total_steps, "without max_epochs it trains until it is stopped"
        ),
        "trainer.seed": "train.seed",
        "trainer.eval_every": Row("eval.eval_freq", get("eval.eval_freq"), "epochs"),
        "trainer.eval_num_inference_steps": Row(
            "eval.num_inference_steps", get("eval.num_inference_steps"), _sigmas_note(family)
        ),
        "trainer.eval_height": Row(("eval.resolution", "eval.height"), there.size(get, "eval", 0)),
        "trainer.eval_width": Row("eval.resolution", there.size(get, "eval", 1)),
        "trainer.save_every": Row(
            "log.save_freq",
            get("log.save_freq") if get("log.save_freq") > 0 else total_steps,
            "epochs; 0 there is never, here at least the last step",
        ),
        "trainer.trackers": Row(
            ("log.logging_backend", "logging_backend"),
            [name for name in TRACKERS if name == tracker],
            "" if tracker in (None, "none", *TRACKERS) else f"without {tracker}",
        ),
    }


_LEFT = (
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
_APART = (
    *under("data", "cache_dir preprocessing_batch_size dataloader_num_workers"),
    *under("data", "enable_preprocess force_reprocess preprocess_parallelism"),
    *under("log", "run_name project save_dir save_model_only verbose"),
    "eval.per_device_batch_size",
    *under("train", "ref_param_device ema_device offload_samples_to_cpu num_batches_per_epoch"),
    *(
        "launcher",
        "project",
        "run_name",
        "main_process_port",
        "num_machines",
        "machine_rank",
        "main_process_ip",
    ),
    *("model.lora_rank", *TEXT_KEYS),  # of runs without an adapter, and of models that do not read them
)

TABLE = Table(
    name="Flow-Factory",
    required=(
        *under("model", "model_name_or_path model_type"),
        *("train.trainer_type", "data.dataset_dir", "rewards"),
    ),
    absent=_ABSENT,
    foreign=_foreign,
    only=_ONLY,
    refuse=_refuse,
    rows=_rows,
    left=_LEFT,
    apart=_APART,
    differences=(
        "Flow-Factory's advantages use the population std, which is sqrt((n - 1) / n) of the std here",
        "Flow-Factory stores latents in float16 unless train.latent_storage_dtype says otherwise; here they are "
        "float32",
        "Flow-Factory begins its average with decays below its own, (1 + n) / (10 + n) at epoch n; here it is one from "
        "the start",
        "Flow-Factory saves and evaluates before a step; here after it",
    ),
)
