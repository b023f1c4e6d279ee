"""The table for verl-omni's configuration, by its Hydra keys."""

from __future__ import annotations

import re
from typing import Any

from flowcorr.config import yaml_text
from flowcorr.errors import ConfigError
from flowcorr.models import FAMILIES
from flowcorr.translate.rewards import named_function, reward_terms
from flowcorr.translate.table import Get, Row, Table
from flowcorr.translate.verl_omni_defaults import (
    ACTOR,
    ALGO,
    CORRECTION,
    DEFAULTS,
    KINDS,
    LOSS,
    MODEL,
    PIPELINE,
    REWARD,
    ROLLOUT,
    VALIDATION,
)

LOSSES = {
    "flow_grpo": "flow_grpo",
    "mix_grpo": "flow_grpo",
    "dance_grpo": "flow_grpo",
    "grpo_guard": "grpo_guard",
    "flow_dppo": "flow_dppo",
}
OTHER_MODELS = ("edit", "bagel", "ltx", "wan", "minimax", "omni-", "hunyuan")
_DTYPES = {
    "fp16": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
}


def _loss(get: Get) -> str:
    return get(f"{LOSS}.loss_mode") or get(f"{MODEL}.algorithm")


def _adapted(get: Get) -> bool:
    return bool(get(f"{MODEL}.lora_rank"))


def _targets(get: Get) -> list[str] | None:
    targets = get(f"{MODEL}.target_modules")
    if isinstance(targets, str) and targets.startswith("["):
        targets = yaml_text.parse(targets)
    return targets if _adapted(get) and isinstance(targets, list) else None


def _window_range(get: Get) -> list[int]:
    """Without a window size, every step but the last is an SDE step; with one, the default range is 0 to 5."""
    steps = get(f"{PIPELINE}.num_inference_steps")
    if not get(f"{ALGO}.sde_window_size"):
        return [0, steps - 1]
    low, high = _pair(get(f"{ALGO}.sde_window_range") or [0, 5], f"{ALGO}.sde_window_range")
    return [low, min(high, steps)]


def _pair(values: list[Any], key: str) -> list[Any]:
    if len(values) != 2 or not all(isinstance(value, int | float) for value in values):
        raise ConfigError(f"{key}={values} must be a list of 2 numbers")
    return values


def _window_size(get: Get) -> int:
    low, high = _window_range(get)
    return get(f"{ALGO}.sde_window_size") or high - low


def _takes_all(get: Get) -> bool:
    """Whether a window has no choice but the whole range, or is one step, so that its layout means nothing."""
    low, high = _window_range(get)
    return _window_size(get) in (1, high - low)


def _is_mix(get: Get) -> bool:
    return get(f"{MODEL}.algorithm") == "mix_grpo"


def _guidance(get: Get) -> float | None:
    return None if "qwen" in get(f"{MODEL}.path").lower() else get(f"{PIPELINE}.guidance_scale")


def _correction(key: str) -> Row:
    source = f"{CORRECTION}.{key}"

    def value(get: Get) -> Any:
        reads = {
            "rollout_is_threshold": "rollout_is",
            "rollout_is_batch_normalize": "rollout_is",
            "rollout_rs_threshold": "rollout_rs",
        }
        in_use = key not in reads or get(f"{CORRECTION}.{reads[key]}") is not None
        return get(source) if in_use and _measures(get) else None

    return Row(key=source, value=value, sources=(source,), always=key == "bypass_mode")


def _measures(get: Get) -> bool:
    return bool(get(f"{CORRECTION}.bypass_mode") or get(f"{ROLLOUT}.calculate_log_probs"))


def _warmup(get: Get) -> int:
    steps = get(f"{ACTOR}.optim.lr_warmup_steps")
    if steps is not None and steps >= 0:
        return steps
    return round(get(f"{ACTOR}.optim.lr_warmup_steps_ratio") * (get("trainer.total_training_steps") or 0))


def _advantage_std(get: Get) -> str:
    if not get("algorithm.norm_adv_by_std_in_grpo"):
        return "none"
    return "global" if get("algorithm.global_std") else "group"


def _rewards(get: Get) -> list[dict[str, Any]]:
    several = get("reward.reward_functions")
    if several:
        return reward_terms(dict(map(named_function, several.items())))
    return reward_terms({f"{get(f'{REWARD}.path')}:{get(f'{REWARD}.name')}": 1.0})


def _text_file(get: Get, key: str) -> str | None:
    """The file of prompts that belongs to a parquet file; None without one."""
    given = get(key)
    paths = given if isinstance(given, list) else [given]
    if paths in ([], [None]):
        return None
    if len(paths) > 1 or not isinstance(paths[0], str):
        raise ConfigError(f"{key}={given} must be one file, since flowcorr reads one; join them")
    return re.sub(r"\.parquet$", ".txt", paths[0])


def _logger(get: Get) -> list[str]:
    return [name for name in ("tensorboard", "wandb") if name in get("trainer.logger")]


def _engine(get: Get) -> dict[str, Any] | None:
    if get(f"{ROLLOUT}.name") != "vllm_omni":
        return None
    return {
        "tensor_parallel_size": get(f"{ROLLOUT}.tensor_model_parallel_size"),
        "gpu_memory_utilization": get(f"{ROLLOUT}.gpu_memory_utilization"),
    }


def _refuse(get: Get) -> str:
    if not get("main").startswith("verl_omni.trainer.main_diffusion"):
        return f"{get('main')} trains no diffusion model; flowcorr translates runs of verl_omni.trainer.main_diffusion"
    if get("algorithm.trainer_type") != "policy_gradient":
        return f"algorithm.trainer_type={get('algorithm.trainer_type')} is not policy_gradient; flowcorr has no other"
    if get("distillation.enabled"):
        return "distillation.enabled=true learns from a teacher, but flowcorr only from rewards"
    if _loss(get) not in LOSSES:
        return f"{LOSS}.loss_mode={_loss(get)} has no equivalent here; flowcorr has {', '.join(LOSSES)}"
    path, frames = get(f"{MODEL}.path"), get(f"{PIPELINE}.num_frames")
    if frames > 1:
        return f"{PIPELINE}.num_frames={frames} makes videos, but flowcorr trains on images"
    if any(word in path.rpartition("/")[2].lower() for word in OTHER_MODELS):
        return f"{MODEL}.path={path} belongs to no family that flowcorr knows: {', '.join(FAMILIES)}"
    if get(f"{ROLLOUT}.n") < 2:
        return f"{ROLLOUT}.n={get(f'{ROLLOUT}.n')} gives an image no other to be compared with; use 2 or more"
    prompts, mini = get("data.train_batch_size"), get(f"{ACTOR}.ppo_mini_batch_size")
    if mini < 1:
        return f"{ACTOR}.ppo_mini_batch_size={mini} must be at least 1"
    if prompts < mini:
        return f"data.train_batch_size={prompts} is below {ACTOR}.ppo_mini_batch_size={mini}, but must be at least that"
    if not get(f"{LOSS}.add_kl_coefficient") and _loss(get) == "flow_dppo":
        return f"{LOSS}.add_kl_coefficient=false bounds a squared distance, but flowcorr's flow_dppo bounds an exact KL"
    return ""


def _same(source: str, key: str, note: str = "") -> Row:
    return Row(key=key, value=lambda get: get(source), sources=(source,), note=note)


def _dtype(source: str, key: str, note: str = "") -> Row:
    return Row(key=key, value=lambda get: _DTYPES.get(str(get(source))), sources=(source,), note=note)


ROWS = (
    _same(f"{MODEL}.path", "model.path"),
    _dtype(f"{ACTOR}.fsdp_config.model_dtype", "model.dtype"),
    _same(f"{PIPELINE}.max_sequence_length", "model.max_sequence_length"),
    _same(f"{MODEL}.lora_rank", "model.lora.rank", "0 trains all weights"),
    Row(
        key="model.lora.alpha",
        value=lambda get: float(get(f"{MODEL}.lora_alpha")) if _adapted(get) else None,
        sources=(f"{MODEL}.lora_alpha",),
    ),
    Row(key="model.lora.targets", value=_targets, sources=(f"{MODEL}.target_modules",)),
    Row(
        key="model.lora.dtype",
        value=lambda get: _DTYPES.get(str(get(f"{MODEL}.lora_dtype"))) if _adapted(get) else None,
        sources=(f"{MODEL}.lora_dtype",),
    ),
    Row(
        key="model.lora.init",
        value=lambda get: (
            ("gaussian" if get(f"{MODEL}.lora_init_weights") == "gaussian" else "kaiming")
            if _adapted(get)
            else None
        ),
        sources=(f"{MODEL}.lora_init_weights",),
    ),
    _same(f"{MODEL}.lora_adapter_path", "model.lora.warm_start"),
    _same(f"{ALGO}.sde_type", "sampling.sde_type"),
    _same(f"{ALGO}.noise_level", "sampling.noise_level"),
    _same(f"{PIPELINE}.num_inference_steps", "sampling.num_inference_steps"),
    Row(key="sampling.sde_window_size", value=_window_size, sources=(f"{ALGO}.sde_window_size",)),
    Row(key="sampling.sde_window_range", value=_window_range, sources=(f"{ALGO}.sde_window_range",)),
    Row(
        key="sampling.sde_window_layout",
        value=lambda get: None if get(f"{ALGO}.sde_contiguous") or _takes_all(get) else "scattered",
        sources=(f"{ALGO}.sde_contiguous",),
        note="of its pipelines, only that of LTX-2 reads it; the others sample consecutive windows",
    ),
    Row(key="sampling.window_per", value=lambda get: None if _is_mix(get) else "sample"),
    Row(
        key="sampling.window_per",
        value=lambda get: "group" if _is_mix(get) else None,
        sources=(f"{MODEL}.algorithm",),
        note="mix_grpo draws one window for all samples of an iteration; one for each prompt is the closest",
    ),
    Row(key="sampling.guidance_scale", value=_guidance, sources=(f"{PIPELINE}.guidance_scale",)),
    _same(f"{PIPELINE}.true_cfg_scale", "sampling.true_cfg_scale"),
    _same(f"{PIPELINE}.height", "sampling.height"),
    _same(f"{PIPELINE}.width", "sampling.width"),
    Row(
        key="sampling.cps_unscaled",
        value=lambda get: True if get(f"{ALGO}.sde_type") == "cps" and _loss(get) != "grpo_guard" else None,
        note="verl-omni's cps log-probs lack 1 / (2 s^2)",
    ),
    _same(f"{ROLLOUT}.name", "rollout.name"),
    Row(
        key="rollout.engine",
        value=_engine,
        sources=(f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.gpu_memory_utilization"),
    ),
    _dtype(f"{ROLLOUT}.dtype", "rollout.dtype"),
    _same("data.train_batch_size", "rollout.prompts_per_step", "prompts"),
    _same(f"{ROLLOUT}.n", "rollout.n"),
    Row(key="rollout.same_initial_noise", value=lambda get: False),
    Row(key="rollout.calculate_log_probs", value=_measures, sources=(f"{ROLLOUT}.calculate_log_probs",)),
    Row(key="actor.loss_mode", value=lambda get: LOSSES[_loss(get)], sources=(f"{LOSS}.loss_mode",)),
    Row(
        key="actor.clip_ratio",
        value=lambda get: None if _loss(get) == "flow_dppo" else float(get(f"{LOSS}.clip_ratio")),
        sources=(f"{LOSS}.clip_ratio",),
    ),
    Row(
        key="actor.kl_threshold",
        value=lambda get: get(f"{LOSS}.kl_mask_threshold") if _loss(get) == "flow_dppo" else None,
        sources=(f"{LOSS}.kl_mask_threshold",),
    ),
    Row(
        key="actor.adv_clip_max",
        value=lambda get: float(get(f"{LOSS}.adv_clip_max")),
        sources=(f"{LOSS}.adv_clip_max",),
    ),
    Row(
        key="actor.kl_coef",
        value=lambda get: float(get(f"{ACTOR}.kl_loss_coef")) if get(f"{ACTOR}.use_kl_loss") else 0.0,
        sources=(f"{ACTOR}.kl_loss_coef", f"{ACTOR}.use_kl_loss"),
        note="only used with use_kl_loss",
    ),
    Row(
        key="actor.kl_weighting",
        value=lambda get: (
            "flow_grpo" if get(f"{ACTOR}.use_kl_loss") and get(f"{ACTOR}.kl_loss_coef") else None
        ),
    ),
    Row(
        key="actor.optimizer",
        value=lambda get: "adamw_8bit" if get(f"{ACTOR}.optim.optimizer") == "AdamW8bit" else "adamw",
        sources=(f"{ACTOR}.optim.optimizer",),
        note="flowcorr has AdamW, in 8 bits by bitsandbytes",
    ),
    Row(key="actor.lr", value=lambda get: float(get(f"{ACTOR}.optim.lr")), sources=(f"{ACTOR}.optim.lr",)),
    Row(
        key="actor.betas",
        value=lambda get: _pair(get(f"{ACTOR}.optim.betas"), f"{ACTOR}.optim.betas"),
        sources=(f"{ACTOR}.optim.betas",),
    ),
    Row(
        key="actor.weight_decay",
        value=lambda get: float(get(f"{ACTOR}.optim.weight_decay")),
        sources=(f"{ACTOR}.optim.weight_decay",),
    ),
    Row(
        key="actor.warmup_steps",
        value=_warmup,
        sources=(f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    ),
    Row(
        key="actor.lr_schedule",
        value=lambda get: get(f"{ACTOR}.optim.lr_scheduler_type"),
        sources=(f"{ACTOR}.optim.lr_scheduler_type",),
    ),
    Row(
        key="actor.lr_min_ratio",
        value=lambda get: (
            None
            if get(f"{ACTOR}.optim.lr_scheduler_type") == "constant"
            else float(get(f"{ACTOR}.optim.min_lr_ratio") or 0)
        ),
        sources=(f"{ACTOR}.optim.min_lr_ratio",),
    ),
    Row(
        key="actor.grad_clip",
        value=lambda get: float(get(f"{ACTOR}.optim.clip_grad")),
        sources=(f"{ACTOR}.optim.clip_grad",),
    ),
    _same(f"{ACTOR}.ppo_epochs", "actor.epochs"),
    Row(
        key="actor.mini_batches",
        value=lambda get: get("data.train_batch_size") // get(f"{ACTOR}.ppo_mini_batch_size"),
        sources=(f"{ACTOR}.ppo_mini_batch_size",),
        note="updates per step: train_batch_size / ppo_mini_batch_size",
    ),
    _same(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "actor.micro_batch_size"),
    Row(
        key="actor.autocast",
        value=lambda get: (
            _DTYPES.get(str(get(f"{ACTOR}.fsdp_config.model_dtype"))) == "float32"
            and _DTYPES.get(str(get(f"{ACTOR}.fsdp_config.dtype"))) == "bfloat16"
        ),
        sources=(f"{ACTOR}.fsdp_config.dtype",),
        note="FSDP's mixed precision",
    ),
    _same(f"{MODEL}.enable_gradient_checkpointing", "actor.gradient_checkpointing"),
    Row(
        key="algorithm.advantage_std",
        value=_advantage_std,
        sources=("algorithm.global_std", "algorithm.norm_adv_by_std_in_grpo"),
    ),
    *map(
        _correction,
        (
            *("bypass_mode", "loss_type", "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"),
            *("rollout_rs", "rollout_rs_threshold"),
        ),
    ),
    Row(
        key=f"{CORRECTION}.rollout_rs_denominator",
        value=lambda get: "all" if _measures(get) and get(f"{CORRECTION}.rollout_rs") else None,
        note="verl-omni's losses divide by all terms",
    ),
    Row(
        key="reward.terms",
        value=_rewards,
        sources=(f"{REWARD}.path", f"{REWARD}.name", "reward.reward_functions"),
        note="write my_rewards:NAME yourself (examples/custom_reward.py); ocr uses an OCR engine, vlm_judge with mode "
        "transcribe a vision-language model",
    ),
    Row(
        key="data.path",
        value=lambda get: _text_file(get, "data.train_files"),
        sources=("data.train_files",),
        note="the prompts as text, such as the train.txt from which the parquet file was made",
    ),
    Row(
        key="data.heldout_path",
        value=lambda get: _text_file(get, "data.val_files"),
        sources=("data.val_files",),
    ),
    Row(
        key="data.num_heldout",
        value=lambda get: get("data.val_max_samples") if get("data.val_max_samples") > 0 else None,
        sources=("data.val_max_samples",),
    ),
    Row(
        key="trainer.total_steps",
        value=lambda get: get("trainer.total_training_steps"),
        sources=("trainer.total_training_steps",),
    ),
    Row(key="trainer.seed", value=lambda get: get("data.seed"), sources=("data.seed",)),
    Row(
        key="trainer.eval_every",
        value=lambda get: max(0, get("trainer.test_freq")),
        sources=("trainer.test_freq",),
    ),
    _same(f"{VALIDATION}.pipeline.num_inference_steps", "trainer.eval_num_inference_steps"),
    _same(f"{VALIDATION}.pipeline.height", "trainer.eval_height"),
    _same(f"{VALIDATION}.pipeline.width", "trainer.eval_width"),
    Row(
        key="trainer.save_every",
        value=lambda get: get("trainer.save_freq") if get("trainer.save_freq") > 0 else None,
        sources=("trainer.save_freq",),
    ),
    _same("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    Row(key="trainer.trackers", value=_logger, sources=("trainer.logger",)),
)


NO_PLACE = {
    f"{ALGO}.s*": "windows are drawn from trainer.seed",
    f"{ALGO}.iters_per_group": "windows are drawn from trainer.seed",
    f"{VALIDATION}.*": "evaluations are deterministic: one image per prompt, with the recipe's guidance",
    f"{ACTOR}.optim.*": "the optimizer is AdamW",
    f"{ACTOR}.fsdp_config.*": "a LoRA's gradients need no sharding; for all weights see actor.fsdp",
    f"{ACTOR}.*loss*": "belongs to losses that are not used, or that flowcorr does not have",
    f"{ACTOR}.*": "belongs to its workers: strategy, offloading, profiling, order of batches",
    "actor_rollout_ref.ref.*": "the reference is the model without its adapter",
    f"{ROLLOUT}.engine_kwargs.*": "options of its engine; set them in rollout.engine",
    f"{ROLLOUT}.*": "belongs to its engine and workers; see rollout.engine, placement and num_workers",
    f"{PIPELINE}.*": "belongs to videos, or to its pipeline",
    f"{MODEL}.*": "read from the pipeline itself, or belongs to its workers",
    "actor_rollout_ref.*": "belongs to its workers",
    "algorithm.adv_estimator": "advantages are those of GRPO",
    "algorithm.*": "belongs to algorithms that flowcorr does not have",
    "reward.*": "see reward.placement; the model of a judge is an option of its term",
    "data.*": "prompts come from a file; text encoders read model.max_sequence_length tokens",
    "trainer.v1.*": "to sample ahead of training: rollout.placement=ray with rollout.max_staleness",
    "trainer.*": "belongs to its trainer: names, folders (--out), devices, validation",
    "critic.*": "there is no critic",
    "distillation.*": "flowcorr does not distil",
    "ray_kwargs.*": "see rollout.ray_address",
    "global_profiler.*": "belongs to its profiler",
    "transfer_queue.*": "belongs to its workers",
    "skip.*": "belongs to its workers",
    "hydra.*": "belongs to Hydra",
}

DIFFERENCES = (
    'verl-omni reads the negative prompt from its data, " " for Qwen-Image; here it is sampling.negative_prompt',
    "verl applies an asymmetric k1 band to the reciprocal ratio; here the band is of exp(delta)",
    "verl-omni's grpo_guard uses the mean std of a step over the batch; here each sample has its own",
)

TABLE = Table(
    name="verl-omni",
    defaults=DEFAULTS,
    kinds=KINDS,
    rows=ROWS,
    no_place=NO_PLACE,
    differences=DIFFERENCES,
    refuse=_refuse,
)
