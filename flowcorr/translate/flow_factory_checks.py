"""Which configurations of Flow-Factory flowcorr cannot run."""

from __future__ import annotations

from flowcorr.translate.families import family_of
from flowcorr.translate.flow_factory_values import (
    MODELS,
    SDE_TYPES,
    adapted,
    batches,
    computes_in_autocast,
    dtype,
    family,
    prompts,
    sde_steps,
    updates,
    weights_dtype,
    window_size,
)
from flowcorr.translate.table import Get

_MOST_STEPS = 1000
_ONLY = {
    "train.advantage_aggregation": ("sum", "gdpo"),
    "train.ema_decay_schedule": ("power", "constant"),
    "model.finetune_type": ("lora", "full"),
    "model.target_components": ("transformer", ["transformer"]),
    "model.resume_type": (None, "lora"),
    "scheduler.dynamics_type": tuple(SDE_TYPES),
    "data.sampler_type": ("auto", "group_contiguous", "distributed_k_repeat"),
}
"""Values that have an equivalent."""


def refuse(get: Get) -> str:
    """Why flowcorr cannot run a configuration, or an empty string."""
    trainer, kind = get("train.trainer_type"), get("model.model_type").lower()
    if trainer.lower() == "grpo-guard":
        return "train.trainer_type=grpo-guard weighs no step by its length, as flowcorr's grpo_guard does"
    if trainer.lower() != "grpo":
        return f"train.trainer_type={trainer} has no equivalent here; flowcorr translates grpo"
    if kind not in MODELS:
        return f"model.model_type={kind} belongs to no family that flowcorr knows: {', '.join(MODELS)}"
    path = get("model.model_name_or_path")
    named = family_of(path)
    if named is not None and named != family(get):
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


def _refuse_weights(get: Get) -> str:
    if adapted(get):
        if get("model.lora_rank") < 1:
            return f"model.lora_rank={get('model.lora_rank')} makes no adapter; use at least 1, or finetune_type=full"
        if get("model.target_modules") == "all":
            return "model.target_modules=all adapts every linear layer; name the layers in a list"
        return ""
    if get("model.resume_path") is not None:
        return "model.resume_path is of a run that trains all weights; start from its model instead, as model.path"
    if weights_dtype(get) != dtype(get, "mixed_precision") and not computes_in_autocast(get):
        return (
            f"model.master_weight_dtype={get('model.master_weight_dtype')} with mixed_precision="
            f"{get('mixed_precision')} has no equivalent here; flowcorr casts float32 to bfloat16"
        )
    return ""


def _refuse_numbers(get: Get) -> str:
    if get("num_processes") is None:
        return "num_processes is not set, which decides the prompts per step; give it"
    whole = ("group_size", "per_device_batch_size", "unique_sample_num_per_epoch", "gradient_step_per_epoch")
    for key in ("num_processes", *(f"train.{name}" for name in (*whole, "num_inner_epochs"))):
        if get(key) < 1:
            return f"{key}={get(key)} must be at least 1"
    if not 2 <= get("train.num_inference_steps") <= _MOST_STEPS:
        return f"train.num_inference_steps={get('train.num_inference_steps')} must be 2 to {_MOST_STEPS}"
    if not 0 <= get("train.ema_decay") < 1:
        return f"train.ema_decay={get('train.ema_decay')} must be in [0, 1)"
    if get("train.group_size") < 2:
        return f"train.group_size={get('train.group_size')} gives an image no other to be compared with; use 2 or more"
    steps, number = sde_steps(get), get("scheduler.num_sde_steps")
    if not steps or steps != list(range(steps[0], steps[-1] + 1)):
        return f"scheduler.sde_steps={get('scheduler.sde_steps')} has gaps, but flowcorr draws from a range of steps"
    if not (number is None or (type(number) is int and number >= 1)):
        return f"scheduler.num_sde_steps={number!r} must be a whole number of at least 1, or null"
    accumulated = get("train.gradient_accumulation_steps")
    if accumulated != "auto" and (
        type(accumulated) is not int
        or accumulated < 1
        or accumulated % window_size(get)
        or batches(get) * window_size(get) % accumulated
    ):
        return (
            f"train.gradient_accumulation_steps={accumulated} splits a batch's SDE steps or an epoch; use "
            f"a multiple of {window_size(get)} that divides {batches(get) * window_size(get)}"
        )
    if updates(get) > prompts(get):
        return (
            f"{updates(get)} updates of an epoch have {prompts(get)} prompts, but flowcorr never splits a group; "
            "use fewer updates"
        )
    return ""
