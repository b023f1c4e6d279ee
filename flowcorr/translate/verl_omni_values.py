"""Values that several of verl-omni's keys give together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.models import ModelFamily
from flowcorr.translate import rewards
from flowcorr.translate.families import family_of
from flowcorr.translate.rewards import Given
from flowcorr.translate.table import Get
from flowcorr.translate.verl_omni_defaults import (
    ACTOR,
    ALGO,
    CORRECTION,
    ENGINE,
    JUDGE,
    LOSS,
    MODEL,
    PIPELINE,
    REWARD,
    REWARDS,
    ROLLOUT,
)

_DTYPES = {
    "fp16": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
}
_KNOWN = {
    "jpeg_compressibility": rewards.JPEG,
    "pickscore_reward": rewards.PICKSCORE,
    "genrm_ocr": rewards.JUDGED_OCR,
}
"""Files of reward functions."""
_OWN_ENTRIES = ("path", "name", "weight", "required")
_TRACKERS = ("tensorboard", "wandb")


def family(get: Get) -> type[ModelFamily]:
    """The model's family; a configuration without one has been refused."""
    found = family_of(get(f"{MODEL}.path"))
    assert found is not None, "a configuration of another family has been refused"
    return found


def loss(get: Get) -> str:
    """Name of the loss."""
    return get(f"{LOSS}.loss_mode") or get(f"{MODEL}.algorithm")


def is_mix(get: Get) -> bool:
    """Whether its pipeline is that of MixGRPO."""
    return get(f"{MODEL}.algorithm") == "mix_grpo"


def adapted(get: Get) -> bool:
    """Whether it trains an adapter."""
    return bool(get(f"{MODEL}.lora_rank"))


def is_veomni(get: Get) -> bool:
    """Whether VeOmni holds the weights, instead of FSDP."""
    return "veomni" in (get(f"{ACTOR}.strategy"), get(ENGINE).removesuffix("_diffusion"))


def dtype(get: Get, key: str) -> str:
    """A dtype by its name here.

    Raises:
        ConfigError: it is none.
    """
    name = str(get(key)).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(unknown_choice(key, name, _DTYPES))
    return _DTYPES[name]


def weights_dtype(get: Get) -> str:
    """The dtype of the model's weights."""
    return dtype(get, f"{ACTOR}.{'veomni' if is_veomni(get) else 'fsdp'}_config.model_dtype")


def adapter_dtype(get: Get) -> str | None:
    """The dtype of the adapter's weights, that of the model's unless a key says so; None without an adapter."""
    if not adapted(get):
        return None
    return weights_dtype(get) if get(f"{MODEL}.lora_dtype") is None else dtype(get, f"{MODEL}.lora_dtype")


def computes_in_autocast(get: Get) -> bool:
    """Whether weights of float32 are cast to bfloat16 to compute with."""
    precise = weights_dtype(get) == "float32"
    return precise and (is_veomni(get) or dtype(get, f"{ACTOR}.fsdp_config.dtype") == "bfloat16")


def targets(get: Get) -> list[str] | None:
    """Names of the layers that get an adapter; None without one.

    Raises:
        ConfigError: they are given as a pattern.
    """
    if not adapted(get):
        return None
    key = f"{MODEL}.target_modules"
    given = get(key)
    if given == "all-linear":
        return list(family(get).linear_layers)
    if not isinstance(given, list):
        raise ConfigError(
            f"{key}={given} is a pattern of whole names to peft; give a list, such as ['to_q','to_k']"
        )
    return given


def pair(key: str, values: list[Any]) -> list[Any]:
    """A list of two numbers.

    Raises:
        ConfigError: it is something else.
    """
    if len(values) != 2 or not all(isinstance(value, int | float) for value in values):
        raise ConfigError(f"{key}={values} must be a list of 2 numbers")
    return values


def window_range(get: Get) -> list[int]:
    """Without a window size, every step but the last is an SDE step; with one, the default range is 0 to 5."""
    steps = get(f"{PIPELINE}.num_inference_steps")
    if not get(f"{ALGO}.sde_window_size"):
        return [0, steps - 1]
    key = f"{ALGO}.sde_window_range"
    low, high = pair(key, get(key) or [0, 5])
    return [low, min(high, steps)]


def window_size(get: Get) -> int:
    """Steps of the SDE window."""
    low, high = window_range(get)
    return get(f"{ALGO}.sde_window_size") or high - low


def guidance(get: Get) -> float:
    """The scale of guidance that its pipeline of the family reads."""
    key = family(get).guidance_key
    return get(f"{PIPELINE}.{key}") or 1.0


def corrects(get: Get) -> bool:
    """Whether verl-omni measures the gap itself."""
    return bool(get(f"{CORRECTION}.bypass_mode") or get(f"{ROLLOUT}.calculate_log_probs"))


def updates(get: Get) -> int:
    """Optimizer updates a pass."""
    return get("data.train_batch_size") // get(f"{ACTOR}.ppo_mini_batch_size")


def warmup(get: Get) -> int:
    """Optimizer updates of the warm-up: its learning rate changes once a training step.

    Without `lr_warmup_steps`, or with 0, the ratio of the training steps counts, rounded down.
    """
    steps = get(f"{ACTOR}.optim.lr_warmup_steps")
    if steps <= 0:
        steps = int(get(f"{ACTOR}.optim.lr_warmup_steps_ratio") * get("trainer.total_training_steps"))
    return steps * updates(get) * get(f"{ACTOR}.ppo_epochs")


def grad_clip(get: Get) -> float:
    """The largest norm of a gradient; the older of its two keys counts, if it is set."""
    older = get(f"{ACTOR}.optim.grad_clip")
    return get(f"{ACTOR}.optim.clip_grad") if older is None else older


def advantage_std(get: Get) -> str:
    """The std that advantages are divided by."""
    if not get("algorithm.norm_adv_by_std_in_grpo"):
        return "none"
    return "global" if get("algorithm.global_std") else "group"


def reward_functions(get: Get) -> list[Given]:
    """Its reward functions.

    Raises:
        ConfigError: one is malformed, or none is named.
    """
    if get("reward.reward_manager.name") == "MultiVisualRewardManager":
        given = get(REWARDS)
        if not given:
            raise ConfigError(
                f"{REWARDS} is empty, but reward.reward_manager.name=MultiVisualRewardManager adds them"
            )
        return [_function(get, f"{REWARDS}.{name}", name, entries) for name, entries in given.items()]
    path = get(f"{REWARD}.path")
    if path is None:  # its data chooses among the rewards that it brings, of which there is one
        return [Given(name="jpeg", known=rewards.JPEG)]
    name = get(f"{REWARD}.name") if _stem(path) == "multi" else _stem(path)
    return [_function(get, REWARD, name, {"path": path, **get(f"{REWARD}.reward_kwargs")})]


def _stem(path: str) -> str:
    """Name of the module of a file or `pkg://package.module`."""
    return re.split(r"[/.]", path.removesuffix(".py"))[-1]


def _function(get: Get, key: str, name: str, entries: Any) -> Given:
    if not isinstance(entries, Mapping) or not isinstance(entries.get("path"), str):
        raise ConfigError(f"{key}={entries!r} must be a section with the path of a file")
    weight = rewards.number(f"{key}.weight", entries.get("weight", 1.0))
    options = {entry: value for entry, value in entries.items() if entry not in _OWN_ENTRIES}
    known = _KNOWN.get(_stem(entries["path"]))
    if known is None:
        return Given(name=name, known=None, weight=weight, options=options)
    asks = {"model": _judge(get)} if known is rewards.JUDGED_OCR else {}
    return Given(
        name=name, known=known, weight=weight, options=asks, without=[f"{key}.{entry}" for entry in options]
    )


def _judge(get: Get) -> str:
    model = get(JUDGE)
    if model is None:
        raise ConfigError(f"{JUDGE} is not set, but genrm_ocr.py asks a model; give its name")
    return model


def rewards_note(get: Get) -> str:
    """A note to the user about the reward functions."""
    scored = get(f"{PIPELINE}.output_type")
    latent = "" if scored is None else f"; {PIPELINE}.output_type={scored} scores latents there, images here"
    return rewards.note(reward_functions(get)) + latent


def text_file(get: Get, key: str) -> str:
    """The file of prompts that belongs to a parquet file.

    Raises:
        ConfigError: it is not one file.
    """
    given = get(key)
    paths = given if isinstance(given, list) else [given]
    if paths in ([], [None]):
        raise ConfigError(f"{key} is not set; give the file")
    if len(paths) > 1 or not isinstance(paths[0], str):
        raise ConfigError(f"{key}={given} must be one file, since flowcorr reads one; join them")
    return re.sub(r"\.parquet$", ".txt", paths[0])


def trackers(get: Get) -> list[str]:
    """The trackers that flowcorr has too."""
    return [name for name in _TRACKERS if name in get("trainer.logger")]


def trackers_note(get: Get) -> str:
    """The trackers that it lacks."""
    lacks = [str(name) for name in get("trainer.logger") if name not in (*_TRACKERS, "console")]
    return f"without {', '.join(lacks)}" if lacks else ""


def engine(get: Get) -> dict[str, Any] | None:
    """Options of the rollout's engine."""
    if get(f"{ROLLOUT}.name") != "vllm_omni":
        return None
    quantization = get(f"{ROLLOUT}.quantization")
    return {
        "tensor_parallel_size": get(f"{ROLLOUT}.tensor_model_parallel_size"),
        "gpu_memory_utilization": get(f"{ROLLOUT}.gpu_memory_utilization"),
    } | ({} if quantization is None else {"quantization": quantization})
