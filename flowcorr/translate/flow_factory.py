"""The table for Flow-Factory's configuration, a YAML file."""

from __future__ import annotations

from flowcorr.translate import rewards
from flowcorr.translate.flow_factory_checks import refuse
from flowcorr.translate.flow_factory_values import (
    DEFAULTS,
    KINDS,
    REQUIRED,
    SDE_TYPES,
    WHOLE_RUN,
    adapted,
    bound,
    computes_in_autocast,
    draws,
    dtype,
    ema,
    family,
    gold_functions,
    guidance,
    prompts,
    prompts_file,
    reward_functions,
    sigmas_note,
    size,
    targets,
    tokens,
    trackers,
    trackers_note,
    updates,
    weights_dtype,
    window_range,
    window_size,
)
from flowcorr.translate.table import Get, Row, Table, same

_ALL_PROMPTS = 100_000
_WIDTH = "Flow-Factory uses the width of the resolution, whatever it says"


def _guidance(key: str) -> Row:
    return Row(
        key=f"sampling.{key}",
        value=lambda get: guidance(get) if family(get).guidance_key == key else None,
        sources=("train.guidance_scale",),
        note=lambda get: "one more than its pipeline counts" if family(get).guidance_offset else "",
    )


def _total_steps(get: Get) -> int:
    epochs = get("train.max_epochs")
    return WHOLE_RUN if epochs is None or epochs < 0 else epochs


ROWS = (
    same("model.model_name_or_path", "model.path"),
    Row(
        key="model.family",
        value=lambda get: family(get).name,
        sources=("model.model_type",),
    ),
    Row(
        key="model.dtype",
        value=weights_dtype,
        sources=("mixed_precision", "model.master_weight_dtype"),
    ),
    same("model.attn_backend", "model.attention"),
    Row(key="model.max_sequence_length", value=tokens),
    Row(
        key="model.lora.rank",
        value=lambda get: get("model.lora_rank") if adapted(get) else None,
        sources=("model.lora_rank", "model.finetune_type"),
    ),
    Row(
        key="model.lora.rank",
        value=lambda get: None if adapted(get) else 0,
        sources=("model.finetune_type", "model.target_modules"),
        note=lambda get: (
            ""
            if get("model.target_modules") == "all"
            else f"there only weights whose names contain one of {get('model.target_modules')}; here all weights"
        ),
    ),
    Row(
        key="model.lora.alpha",
        value=lambda get: (get("model.lora_alpha") or 2.0 * get("model.lora_rank")) if adapted(get) else None,
        sources=("model.lora_alpha",),
    ),
    Row(
        key="model.lora.targets",
        value=targets,
        sources=("model.target_modules", "model.target_components"),
        note=lambda get: (
            "without img_mlp.net.2.proj and txt_mlp.net.2.proj, which name no layer"
            if get("model.target_modules") == "default" and family(get).name == "qwen_image"
            else ""
        ),
    ),
    Row(
        key="model.lora.dtype",
        value=lambda get: dtype(get, "model.master_weight_dtype") if adapted(get) else None,
        sources=("model.master_weight_dtype",),
    ),
    same("model.resume_path", "model.lora.warm_start"),
    Row(
        key="sampling.sde_type",
        value=lambda get: SDE_TYPES[get("scheduler.dynamics_type")],
        sources=("scheduler.dynamics_type",),
    ),
    Row(
        key="sampling.cps_unscaled",
        value=lambda get: True if get("scheduler.dynamics_type") == "CPS" else None,
        note="its cps log-probs lack 1 / (2 s^2)",
    ),
    same("scheduler.noise_level", "sampling.noise_level"),
    same("train.num_inference_steps", "sampling.num_inference_steps", sigmas_note),
    Row(key="sampling.sde_window_size", value=window_size, sources=("scheduler.num_sde_steps",)),
    Row(
        key="sampling.sde_window_range",
        value=window_range,
        sources=("scheduler.sde_steps",),
        note="it draws once an epoch for all samples; here for each prompt",
    ),
    Row(
        key="sampling.sde_window_layout",
        value=lambda get: "scattered" if draws(get) else None,
        note="any of the steps",
    ),
    _guidance("guidance_scale"),
    _guidance("true_cfg_scale"),
    Row(
        key="sampling.height",
        value=lambda get: size(get, "train", 0),
        sources=("train.resolution", "train.height"),
    ),
    Row(
        key="sampling.width",
        value=lambda get: size(get, "train", 1),
        sources=("train.resolution",),
    ),
    Row(
        key="rollout.dtype",
        value=lambda get: dtype(get, "mixed_precision"),
        sources=("mixed_precision",),
    ),
    Row(
        key="rollout.prompts_per_step",
        value=prompts,
        sources=(
            *("train.unique_sample_num_per_epoch", "num_processes", "data.sampler_type"),
            *("train.per_device_batch_size", "train.gradient_step_per_epoch"),
        ),
        note="rounded up there too, until batches, processes and updates come out even",
    ),
    same("train.group_size", "rollout.n"),
    same("train.per_device_batch_size", "rollout.batch_size"),
    Row(key="rollout.same_initial_noise", value=lambda get: False),
    Row(
        key="actor.loss_mode",
        value=lambda get: "flow_grpo",
        sources=("train.trainer_type",),
    ),
    Row(
        key="actor.clip_ratio",
        value=lambda get: bound(get, "train.clip_range"),
        sources=("train.clip_range",),
    ),
    Row(
        key="actor.adv_clip_max",
        value=lambda get: bound(get, "train.adv_clip_range"),
        sources=("train.adv_clip_range",),
    ),
    same("train.kl_beta", "actor.kl_coef"),
    same("train.learning_rate", "actor.lr"),
    same("train.adam_betas", "actor.betas"),
    same("train.adam_epsilon", "actor.eps"),
    same("train.adam_weight_decay", "actor.weight_decay"),
    same("train.max_grad_norm", "actor.grad_clip"),
    same("train.num_inner_epochs", "actor.epochs"),
    Row(
        key="actor.mini_batches",
        value=updates,
        sources=("train.gradient_step_per_epoch", "train.gradient_accumulation_steps"),
        note="updates of an epoch; groups are never split here",
    ),
    same("train.per_device_batch_size", "actor.micro_batch_size"),
    Row(
        key="actor.autocast",
        value=computes_in_autocast,
        sources=("mixed_precision",),
    ),
    same("train.enable_gradient_checkpointing", "actor.gradient_checkpointing"),
    Row(
        key="actor.ema",
        value=ema,
        sources=("train.ema_decay", "train.ema_update_interval", "train.ema_decay_schedule"),
        note=lambda get: (
            f"{get('train.ema_decay')} every {get('train.ema_update_interval')} epochs there; this is the decay of one "
            "update"
        ),
    ),
    Row(
        key="algorithm.advantage_std",
        value=lambda get: (
            "global" if get("train.global_std") or get("train.advantage_aggregation") == "gdpo" else "group"
        ),
        sources=("train.global_std", "train.advantage_aggregation"),
        note=lambda get: (
            "gdpo divides each reward by its group's std, and their sum by that of all"
            if get("train.advantage_aggregation") == "gdpo"
            else ""
        ),
    ),
    Row(
        key="algorithm.rollout_correction.bypass_mode",
        value=lambda get: True,
        note="old log-probs are the rollout's",
    ),
    Row(
        key="reward.terms",
        value=lambda get: rewards.terms(
            reward_functions(get),
            normalize="group" if get("train.advantage_aggregation") == "gdpo" else "none",
        ),
        sources=("rewards",),
        note=lambda get: rewards.note(reward_functions(get)),
    ),
    Row(
        key="reward.gold",
        value=lambda get: rewards.terms(gold_functions(get)) or None,
        sources=("eval_rewards",),
        note=lambda get: rewards.note(gold_functions(get)),
    ),
    Row(
        key="reward.gold_every",
        value=lambda get: "evaluation" if gold_functions(get) else None,
        note="only its evaluations score them",
    ),
    Row(
        key="data.path",
        value=lambda get: prompts_file(get, "train"),
        sources=("data.dataset_dir",),
        note="train.jsonl if there is one",
    ),
    Row(
        key="data.heldout_path",
        value=lambda get: prompts_file(get, "test"),
        sources=("data.dataset_dir",),
    ),
    Row(key="data.num_heldout", value=lambda get: _ALL_PROMPTS, note="all of them are evaluated"),
    Row(
        key="trainer.total_steps",
        value=_total_steps,
        sources=("train.max_epochs",),
        note=lambda get: "" if _total_steps(get) < WHOLE_RUN else "it trains until it is stopped",
    ),
    same("train.seed", "trainer.seed"),
    same("eval.eval_freq", "trainer.eval_every", "epochs"),
    same("eval.num_inference_steps", "trainer.eval_num_inference_steps", sigmas_note),
    Row(
        key="trainer.eval_height",
        value=lambda get: size(get, "eval", 0),
        sources=("eval.resolution", "eval.height"),
    ),
    Row(
        key="trainer.eval_width",
        value=lambda get: size(get, "eval", 1),
        sources=("eval.resolution",),
    ),
    Row(
        key="trainer.save_every",
        value=lambda get: get("log.save_freq") if get("log.save_freq") > 0 else _total_steps(get),
        sources=("log.save_freq",),
        note=lambda get: "epochs" if get("log.save_freq") > 0 else "never there; the last step here",
    ),
    Row(
        key="trainer.trackers",
        value=trackers,
        sources=("log.logging_backend", "logging_backend"),
        note=trackers_note,
    ),
)

NO_PLACE = {
    "train.width": _WIDTH,
    "eval.width": _WIDTH,
    "eval.guidance_scale": "evaluations use the guidance of sampling",
    "eval.*": "evaluations are deterministic: one image per prompt",
    "scheduler.seed": "windows are drawn from trainer.seed",
    "data.max_dataset_size": "shorten the file of prompts",
    "data.*": "prompts come from a file",
    "log.*": "belongs to its tracker and folders; give --out",
    "model.*": "belongs to other kinds of weights",
    "train.kl_type": "without kl_beta there is no KL",
    "train.ref_param_device": "the reference is the model without its adapter",
    "train.*condition*": "belongs to models that edit images",
    "train.*": "belongs to its memory, or to trainers that are not used",
    "launcher": "see flowcorr train --help, and rollout.placement",
    "config_file": "see actor.fsdp",
    "project": "belongs to its tracker and folders; give --out",
    "run_name": "belongs to its tracker and folders; give --out",
    "main_process_port": "belongs to its launcher",
}

DIFFERENCES = (
    "Flow-Factory's advantages use the population std, which is sqrt((n - 1) / n) of the std here",
    "Flow-Factory stores latents in float16 unless train.latent_storage_dtype says otherwise; here they are float32",
    "Flow-Factory begins its average with decays below its own, (1 + n) / (10 + n) at epoch n; here it is one from the "
    "start",
    "Flow-Factory saves and evaluates before a step; here after it",
)

TABLE = Table(
    name="Flow-Factory",
    defaults=DEFAULTS,
    kinds=KINDS,
    required=REQUIRED,
    sections=("rewards", "eval_rewards"),
    rows=ROWS,
    no_place=NO_PLACE,
    differences=DIFFERENCES,
    refuse=refuse,
)
