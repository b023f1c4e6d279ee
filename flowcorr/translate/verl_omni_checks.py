"""Which configurations of verl-omni flowcorr cannot run."""

from __future__ import annotations

from typing import Any

from flowcorr.translate.families import family_of, not_known
from flowcorr.translate.table import Get
from flowcorr.translate.verl_omni_defaults import (
    ACTOR,
    ALGO,
    ASYNC,
    ENGINE,
    LOSS,
    MODEL,
    PIPELINE,
    ROLLOUT,
)
from flowcorr.translate.verl_omni_values import (
    adapted,
    computes_in_autocast,
    dtype,
    is_veomni,
    loss,
    weights_dtype,
)

LOSSES = {
    "flow_grpo": "flow_grpo",
    "mix_grpo": "flow_grpo",
    "dance_grpo": "flow_grpo",
    "grpo_guard": "grpo_guard",
    "flow_dppo": "flow_dppo",
}
_FAMILIES = ("sd3", "qwen_image")
_SCHEDULES = ("constant", "cosine")
_OF_SDE_STEPS = ("grpo_guard", "flow_dppo")
_ONLY: dict[str, tuple[Any, ...]] = {
    f"{MODEL}.algorithm": tuple(LOSSES),
    f"{LOSS}.loss_mode": (None, *LOSSES),
    "algorithm.adv_estimator": (None, *LOSSES),
    "algorithm.trainer_type": ("policy_gradient",),
    "algorithm.sample_source": ("online",),
    "distillation.enabled": (False,),
    f"{ACTOR}.use_distill_loss": (False,),
    f"{MODEL}.model_type": ("diffusion_model",),
    f"{ALGO}.sample_strategy": ("random",),
    f"{ACTOR}.optim.optimizer": ("AdamW", "AdamW8bit", "adamw"),
    f"{ACTOR}.optim.override_optimizer_config": (None, {}),
    f"{ACTOR}.optim.num_cycles": (0.5,),
    "reward.aggregation": ("weighted_sum",),
    "reward.reward_manager.name": ("VisualRewardManager", "MultiVisualRewardManager"),
    ENGINE: ("dp_diffusion", "veomni_diffusion"),
}
"""Values that have an equivalent."""
_OF_ADAPTERS: dict[str, tuple[Any, ...]] = {
    f"{MODEL}.target_parameters": (None, []),
    f"{MODEL}.exclude_modules": (None, []),
    f"{MODEL}.lora_init_weights": ("gaussian", True, "default", "kaiming"),
}


def refuse(get: Get) -> str:
    """Why flowcorr cannot run a configuration, or an empty string."""
    if not get("main").startswith("verl_omni.trainer.main_diffusion"):
        return f"{get('main')} trains no diffusion model; flowcorr translates runs of verl_omni.trainer.main_diffusion"
    if get(f"{PIPELINE}.num_frames") > 1:
        return f"{PIPELINE}.num_frames={get(f'{PIPELINE}.num_frames')} makes videos, but flowcorr trains on images"
    for key, values in {**_ONLY, **(_OF_ADAPTERS if adapted(get) else {})}.items():
        if get(key) not in values:
            known = ", ".join(str(value) for value in values if value)
            return f"{key}={get(key)} has no equivalent here{f'; flowcorr has {known}' if known else ''}"
    path = get(f"{MODEL}.path")
    family = family_of(path)
    if family is None or family.name not in _FAMILIES:
        return not_known(f"{MODEL}.path", path)
    if get(f"{ROLLOUT}.name") is None:
        return f"{ROLLOUT}.name is not set, which verl-omni needs"
    if get(f"{ROLLOUT}.n") < 2:
        return f"{ROLLOUT}.n={get(f'{ROLLOUT}.n')} gives an image no other to be compared with; use 2 or more"
    if get("trainer.total_training_steps") is None:
        return (
            "trainer.total_training_steps is not set, so that the number of prompts decides; give it: "
            f"total_epochs={get('trainer.total_epochs')} times the prompts / data.train_batch_size"
        )
    return _refuse_updates(get) or _refuse_numbers(get)


def _refuse_updates(get: Get) -> str:
    prompts, mini = get("data.train_batch_size"), get(f"{ACTOR}.ppo_mini_batch_size")
    if mini < 1:
        return f"{ACTOR}.ppo_mini_batch_size={mini} must be at least 1"
    if prompts % mini or prompts < 1:
        return f"data.train_batch_size={prompts} must be a multiple of {ACTOR}.ppo_mini_batch_size={mini}"
    if not get(f"{LOSS}.add_kl_coefficient") and loss(get) == "flow_dppo":
        return f"{LOSS}.add_kl_coefficient=false bounds a squared distance, but flowcorr's flow_dppo bounds an exact KL"
    if loss(get) in _OF_SDE_STEPS and get(f"{ALGO}.sde_type") != "sde":
        return (
            f"{ALGO}.sde_type={get(f'{ALGO}.sde_type')} gives {loss(get)} a std multiplied by sqrt(step) twice, so "
            "its numbers have another unit; flowcorr translates it with sde"
        )
    asynchronous = get("trainer.use_v1") and get("trainer.v1.trainer_mode") == "separate_async"
    if asynchronous and get(ASYNC) != 1:
        return f"{ASYNC}={get(ASYNC)} counts as many batches as one step, but flowcorr counts each; translate it with 1"
    return ""


def _refuse_numbers(get: Get) -> str:
    schedule = f"{ACTOR}.optim.lr_scheduler_type"
    if is_veomni(get) and get(schedule) != "constant":
        return (
            f"{schedule}={get(schedule)} falls otherwise with VeOmni than here; flowcorr translates constant"
        )
    if get(schedule) not in _SCHEDULES:
        return (
            f"{schedule}={get(schedule)} is none of verl-omni's schedules with FSDP: {', '.join(_SCHEDULES)}"
        )
    weights, computed = weights_dtype(get), f"{ACTOR}.fsdp_config.dtype"
    if not is_veomni(get) and dtype(get, computed) != weights and not computes_in_autocast(get):
        return f"{computed}={get(computed)} with weights of {weights} has no equivalent; use the same, or bfloat16"
    return ""
