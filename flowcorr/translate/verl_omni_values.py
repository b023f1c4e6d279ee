"""Values that several of verl-omni's keys give together, and configurations that flowcorr cannot run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flowcorr.errors import ConfigError
from flowcorr.translate import rewards
from flowcorr.translate.families import TRANSLATED, require_family
from flowcorr.translate.rewards import Reward
from flowcorr.translate.table import Given, dtype_of, too_small

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
LOSS, PIPELINE, ALGO, OPTIM = (
    f"{ACTOR}.diffusion_loss",
    f"{ROLLOUT}.pipeline",
    f"{ROLLOUT}.algo",
    f"{ACTOR}.optim",
)
VALIDATION, CORRECTION = f"{ROLLOUT}.val_kwargs.pipeline", "algorithm.rollout_correction"
FUNCTION, FUNCTIONS, JUDGE = (
    "reward.custom_reward_function",
    "reward.reward_functions",
    "reward.reward_model.model_path",
)

LOSSES = {
    "flow_grpo": "flow_grpo",
    "mix_grpo": "flow_grpo",
    "dance_grpo": "flow_grpo",
    "grpo_guard": "grpo_guard",
    "flow_dppo": "flow_dppo",
}
_ONLY_OF_ADAPTERS: dict[str, tuple[Any, ...]] = {
    f"{MODEL}.target_parameters": (None, []),
    f"{MODEL}.exclude_modules": (None, []),
    f"{MODEL}.lora_init_weights": ("gaussian", True, "default", "kaiming"),
}
_REWARD_FILES = {
    "jpeg_compressibility": rewards.JPEG,
    "pickscore_reward": rewards.PICKSCORE,
    "genrm_ocr": rewards.JUDGED_OCR,
}


def family(get: Given) -> str:
    """The name of the model's family."""
    return require_family(f"{MODEL}.path", get(f"{MODEL}.path", str), ("sd3", "qwen_image"))


def loss_of(get: Given) -> str:
    """Name of the loss."""
    return str(get(f"{LOSS}.loss_mode") or get(f"{MODEL}.algorithm"))


def adapted(get: Given) -> bool:
    """Whether it trains an adapter."""
    return bool(get(f"{MODEL}.lora_rank", int))


def is_veomni(get: Given) -> bool:
    """Whether VeOmni holds the weights, instead of FSDP."""
    return "veomni" in (get(f"{ACTOR}.strategy"), get("model_engine").removesuffix("_diffusion"))


def weights_dtype(get: Given) -> str:
    """The dtype of the model's weights."""
    return dtype_of(get, f"{ACTOR}.{'veomni' if is_veomni(get) else 'fsdp'}_config.model_dtype")


def autocast(get: Given) -> bool:
    """Whether weights of float32 are cast to bfloat16 to compute with."""
    precise = weights_dtype(get) == "float32"
    return precise and (is_veomni(get) or dtype_of(get, f"{ACTOR}.fsdp_config.dtype") == "bfloat16")


def targets(get: Given) -> list[str]:
    """Names of the layers that get an adapter. Raises `ConfigError` for a pattern."""
    key = f"{MODEL}.target_modules"
    given = get(key)
    if given == "all-linear":
        return list(TRANSLATED[family(get)].linear_layers)
    if not isinstance(given, list):
        raise ConfigError(
            f"{key}={given} is a pattern of whole names to peft; give a list, such as ['to_q','to_k']"
        )
    return given


def pair(key: str, values: Any) -> list[Any]:
    """A list of two numbers; raises `ConfigError` for another value."""
    if (
        not isinstance(values, list)
        or len(values) != 2
        or not all(type(part) in (int, float) for part in values)
    ):
        raise ConfigError(f"{key}={values} must be a list of 2 numbers")
    return values


def window_range(get: Given) -> list[int]:
    """Without a window size, every step but the last is an SDE step; with one, the default range is 0 to 5."""
    steps = get(f"{PIPELINE}.num_inference_steps", int)
    if not get(f"{ALGO}.sde_window_size", int | None):
        return [0, steps - 1]
    key = f"{ALGO}.sde_window_range"
    low, high = pair(key, get(key) or [0, 5])
    return [low, min(high, steps)]


def window_size(get: Given) -> int:
    """Steps of the SDE window."""
    low, high = window_range(get)
    return get(f"{ALGO}.sde_window_size", int | None) or high - low


def corrects(get: Given) -> bool:
    """Whether verl-omni measures the gap itself."""
    return bool(get(f"{CORRECTION}.bypass_mode", bool) or get(f"{ROLLOUT}.calculate_log_probs", bool))


def warmup(get: Given, updates: int) -> int:
    """Optimizer updates of the warm-up: its learning rate changes once a training step, of so many `updates` a pass.

    Without `lr_warmup_steps`, or with 0, the ratio of the training steps counts, rounded down.
    """
    steps = get(f"{OPTIM}.lr_warmup_steps", int)
    if steps <= 0:
        ratio = get(f"{OPTIM}.lr_warmup_steps_ratio", float)
        steps = int(ratio * get("trainer.total_training_steps", int))
    return steps * updates * get(f"{ACTOR}.ppo_epochs", int)


def kl_coef(get: Given) -> float:
    """The coefficient of the KL to the reference."""
    return get(f"{ACTOR}.kl_loss_coef", float) if get(f"{ACTOR}.use_kl_loss", bool) else 0.0


def reward_functions(get: Given) -> list[Reward]:
    """Its reward functions.

    Raises:
        ConfigError: one is malformed, or none is named.
    """
    if get("reward.reward_manager.name") == "MultiVisualRewardManager":
        given = get(FUNCTIONS, dict | None)
        if not given:
            raise ConfigError(
                f"{FUNCTIONS} is empty, but reward.reward_manager.name=MultiVisualRewardManager adds them"
            )
        return [_reward(get, f"{FUNCTIONS}.{name}", name, entries) for name, entries in given.items()]
    path = get(f"{FUNCTION}.path", str | None)
    if path is None:  # its data chooses among the rewards that it brings, of which there is one
        return [Reward(name="jpeg", known=rewards.JPEG)]
    name = get(f"{FUNCTION}.name") if _stem(path) == "multi" else _stem(path)
    return [
        _reward(get, FUNCTION, name, {"path": path, **(get(f"{FUNCTION}.reward_kwargs", dict | None) or {})})
    ]


def _stem(path: str) -> str:
    """Name of the module of a file or `pkg://package.module`."""
    return re.split(r"[/.]", path.removesuffix(".py"))[-1]


def _reward(get: Given, key: str, name: str, entries: Any) -> Reward:
    if not isinstance(entries, Mapping) or not isinstance(entries.get("path"), str):
        raise ConfigError(f"{key}={entries!r} must be a section with the path of a file")
    weight = rewards.number(f"{key}.weight", entries.get("weight", 1.0))
    options = {
        entry: value
        for entry, value in entries.items()
        if entry not in ("path", "name", "weight", "required")
    }
    known = _REWARD_FILES.get(_stem(entries["path"]))
    if known is None:
        return Reward(name=name, known=None, weight=weight, options=options)
    asks = {}
    if known is rewards.JUDGED_OCR:
        asks["model"] = get(JUDGE, str | None)
        if asks["model"] is None:
            raise ConfigError(f"{JUDGE} is not set, but genrm_ocr.py asks a model; give its name")
    return Reward(
        name=name, known=known, weight=weight, options=asks, without=[f"{key}.{entry}" for entry in options]
    )


def is_judged(get: Given) -> bool:
    """Whether a language model scores the images."""
    return any(reward.known is rewards.JUDGED_OCR for reward in reward_functions(get))


def samples_ahead(get: Given) -> bool:
    """Whether it samples ahead of training."""
    return get("trainer.use_v1", bool) and get.plain("trainer.v1.trainer_mode") not in (None, "sync")


def text_file(get: Given, key: str) -> str:
    """The file of prompts as text that belongs to a parquet file."""
    paths = get(key, list | None) or [None]
    if paths == [None]:
        raise ConfigError(f"{key} is not set; give the file")
    if len(paths) > 1 or not isinstance(paths[0], str):
        raise ConfigError(f"{key}={paths} must be one file, since flowcorr reads one; join them")
    return re.sub(r"\.parquet$", ".txt", paths[0])


def engine_options(get: Given) -> dict[str, Any] | None:
    """Options of the rollout's engine."""
    if get(f"{ROLLOUT}.name") != "vllm_omni":
        return None
    quantization = get(f"{ROLLOUT}.quantization")
    return {
        "tensor_parallel_size": get(f"{ROLLOUT}.tensor_model_parallel_size"),
        "gpu_memory_utilization": get(f"{ROLLOUT}.gpu_memory_utilization"),
    } | ({} if quantization is None else {"quantization": quantization})


def foreign(get: Given) -> str:
    """Why flowcorr has no such model, or an empty string; raises `ConfigError` for a path without a family."""
    if get(f"{PIPELINE}.num_frames", int) > 1:
        return f"{PIPELINE}.num_frames={get(f'{PIPELINE}.num_frames')} makes videos, whose recipes are not translated"
    family(get)
    return ""


def refuse(get: Given) -> str:
    """Why flowcorr cannot run a configuration, or an empty string."""
    for key, values in _ONLY_OF_ADAPTERS.items() if adapted(get) else ():
        if get(key) not in values:
            return f"{key}={get(key)} has no equivalent here"
    if get(f"{ROLLOUT}.name") is None:
        return f"{ROLLOUT}.name is not set, which verl-omni needs"
    if get("trainer.total_training_steps", int | None) is None:
        return (
            "trainer.total_training_steps is not set, so that the number of prompts decides; give it: "
            f"total_epochs={get('trainer.total_epochs')} times the prompts / data.train_batch_size"
        )
    if reason := too_small(get, (f"{ACTOR}.ppo_mini_batch_size",), f"{ROLLOUT}.n"):
        return reason
    prompts, mini = get("data.train_batch_size", int), get(f"{ACTOR}.ppo_mini_batch_size", int)
    if prompts % mini or prompts < 1:
        return f"data.train_batch_size={prompts} must be a multiple of {ACTOR}.ppo_mini_batch_size={mini}"
    if loss_of(get) == "flow_dppo" and not get(f"{LOSS}.add_kl_coefficient", bool):
        return f"{LOSS}.add_kl_coefficient=false bounds a squared distance, but flowcorr's flow_dppo bounds an exact KL"
    if loss_of(get) in ("grpo_guard", "flow_dppo") and get(f"{ALGO}.sde_type") != "sde":
        return (
            f"{ALGO}.sde_type={get(f'{ALGO}.sde_type')} gives {loss_of(get)} a std multiplied by sqrt(step) twice, so "
            "its numbers have another unit; flowcorr translates it with sde"
        )
    sync = "trainer.v1.separate_async.parameter_sync_step"
    if get("trainer.use_v1", bool) and get("trainer.v1.trainer_mode") == "separate_async" and get(sync) != 1:
        return f"{sync}={get(sync)} counts as many batches as one step, but flowcorr counts each; translate it with 1"
    schedule = get(f"{OPTIM}.lr_scheduler_type")
    if schedule not in (("constant",) if is_veomni(get) else ("constant", "cosine")):
        return (
            f"{OPTIM}.lr_scheduler_type={schedule} is no schedule of verl-omni with FSDP (constant, cosine), or falls "
            "otherwise with VeOmni than here; flowcorr translates constant"
        )
    computed = f"{ACTOR}.fsdp_config.dtype"
    if not is_veomni(get) and dtype_of(get, computed) != weights_dtype(get) and not autocast(get):
        return (
            f"{computed}={get(computed)} with weights of {weights_dtype(get)} has no equivalent; use the same"
        )
    return ""
