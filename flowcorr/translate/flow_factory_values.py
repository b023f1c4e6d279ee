"""Values that several of Flow-Factory's keys give together."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flowcorr.config.layers import ATTENTION, JOINT_ATTENTION, JOINT_FEED_FORWARD
from flowcorr.errors import ConfigError
from flowcorr.translate import rewards
from flowcorr.translate.rewards import Reward
from flowcorr.translate.table import Given, dtype_of

TEXT_KEYS = ("train.negative_prompt", "train.max_sequence_length")
"""Keys that it declares nowhere, and hands on to the function that encodes the prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A value of `model.model_type`.

    Attributes:
        family: the name of its family here.
        attention, others: those layers of `target_modules: default` that its transformer has.
        tokens: of its long text encoder.
        reads: those keys of `TEXT_KEYS` that the function which encodes its prompts takes.
        takes_references: whether it takes reference images.
    """

    family: str
    attention: tuple[str, ...] = JOINT_ATTENTION
    others: tuple[str, ...] = ()
    tokens: int = 512
    reads: tuple[str, ...] = TEXT_KEYS
    takes_references: bool = False


MODELS = {
    "sd3-5": Model(family="sd3", tokens=256, reads=("train.negative_prompt",)),
    "flux1": Model(family="flux", others=JOINT_FEED_FORWARD, reads=()),
    "flux2-klein": Model(
        family="flux2_klein",
        others=(
            *("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
            "attn.to_qkv_mlp_proj",
        ),
        takes_references=True,
    ),
    "qwen-image": Model(
        family="qwen_image", others=("img_mlp.net.0.proj", "txt_mlp.net.0.proj"), tokens=1024
    ),
    "z-image": Model(
        family="z_image",
        attention=tuple(f"attention.{layer}" for layer in ATTENTION),
        others=("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    ),
}
_KNOWN = {"pickscore": rewards.PICKSCORE, "ocr": rewards.OCR}
_OWN_ENTRIES = ("name", "reward_model", "weight")
_OF_ITS_WORKERS = ("batch_size", "device", "dtype", "async_reward", "num_workers")


def model_of(get: Given) -> Model:
    """The row of its model."""
    return MODELS[get("model.model_type", str).lower()]


def adapted(get: Given) -> bool:
    """Whether it trains an adapter."""
    return bool(get("model.finetune_type") == "lora")


def weights_dtype(get: Given) -> str:
    """The dtype of the transformer's weights."""
    return dtype_of(get, "mixed_precision" if adapted(get) else "model.master_weight_dtype")


def computes_in_autocast(get: Given) -> bool:
    """Whether weights of float32 are cast to bfloat16 to compute with."""
    return weights_dtype(get) == "float32" and dtype_of(get, "mixed_precision") == "bfloat16"


def targets(get: Given) -> list[str] | None:
    """Names of the layers that get an adapter; None without one."""
    given = get("model.target_modules")
    if not adapted(get):
        return None
    if given == "default":
        return [*model_of(get).attention, *model_of(get).others]
    return given if isinstance(given, list) else [given]


def takes_references(get: Given) -> bool:
    """Whether the model takes reference images, if the prompts have some."""
    return model_of(get).takes_references


def references_note(get: Given) -> str:
    """A note on the folders of reference images, in Flow-Factory and here."""
    if not takes_references(get):
        return "train.jsonl if there is one"
    folder = get.plain("data.image_dir") or os.path.join(get("data.dataset_dir", str), "images/")
    return (
        f"train.jsonl if there is one; reference images that its lines name lie in {folder} there, and here beside the "
        "file: write their paths from it"
    )


def size(get: Given, section: str, side: int) -> int:
    """Height (side 0) or width (1) in pixels; the key of the height counts before the resolution."""
    height = get(f"{section}.height", int | None)
    if side == 0 and height is not None:
        return height
    given = get(f"{section}.resolution")
    sides = given if isinstance(given, list) else [given]
    if not sides or not all(type(pixels) is int for pixels in sides):
        raise ConfigError(f"{section}.resolution={given} must be a whole number, or a list of two")
    return sides[min(side, len(sides) - 1)]


def sde_steps(get: Given) -> list[int]:
    """The steps that may be SDE steps: without a list, all but the last."""
    given = get("scheduler.sde_steps", list | None)
    if given is None:
        return list(range(get("train.num_inference_steps") - 1))
    if not all(type(step) is int for step in given):
        raise ConfigError(f"scheduler.sde_steps={given} must be a list of whole numbers")
    return sorted(given)


def window_size(get: Given) -> int:
    """SDE steps of a trajectory."""
    number, steps = get("scheduler.num_sde_steps", int | None), sde_steps(get)
    return len(steps) if number is None else min(number, len(steps))


def prompts(get: Given) -> int:
    """Prompts of an epoch, after it has made batches, ranks and updates come out even."""
    ranks, batch, group = (
        get("num_processes", int),
        get("train.per_device_batch_size"),
        get("train.group_size"),
    )
    wanted = get("train.unique_sample_num_per_epoch")
    step = ranks * batch // math.gcd(group, ranks * batch)
    if get("train.gradient_accumulation_steps") == "auto":
        step *= get("train.gradient_step_per_epoch")
    if _groups_stay_together(get):
        step = math.lcm(step, ranks)
    return -(-wanted // step) * step


def _groups_stay_together(get: Given) -> bool:
    """Whether all images of a prompt are made by one rank."""
    sampler = get("data.sampler_type")
    if sampler != "auto":
        every = (*_entries("rewards", get("rewards")), *_entries("eval_rewards", get("eval_rewards") or []))
        return bool(sampler == "group_contiguous" or any(entries.get("async_reward") for entries in every))
    wanted, ranks = get("train.unique_sample_num_per_epoch"), get("num_processes", int)
    tiled = wanted // ranks * get("train.group_size") % get("train.per_device_batch_size") == 0
    return wanted % ranks == 0 or not tiled


def batches(get: Given) -> int:
    """Batches of a rank in an epoch."""
    return (
        prompts(get)
        * get("train.group_size")
        // (get("num_processes", int) * get("train.per_device_batch_size"))
    )


def updates(get: Given) -> int:
    """Optimizer updates a pass: by default gradient_step_per_epoch, else by the backward passes of an update."""
    accumulated = get("train.gradient_accumulation_steps")
    if accumulated == "auto":
        return get("train.gradient_step_per_epoch")
    return batches(get) * window_size(get) // accumulated


def bound(get: Given, key: str) -> float:
    """A symmetric range by its bound; raises `ConfigError` for another."""
    given = get(key)
    low, high = given if isinstance(given, list | tuple) and len(given) == 2 else (given, given)
    if not all(type(value) in (int, float) for value in (low, high)) or abs(low) != abs(high):
        raise ConfigError(
            f"{key}={given} has no equivalent here; flowcorr has symmetric ranges, such as 1e-4"
        )
    return float(abs(high))


def _entries(key: str, given: Any) -> list[Mapping[str, Any]]:
    listed = given if isinstance(given, list) else [given]
    for entries in listed:
        if not isinstance(entries, Mapping) or not isinstance(entries.get("reward_model"), str):
            raise ConfigError(f"{key}={entries!r} must be a section with a reward_model")
    return listed


def reward_functions(get: Given) -> list[Reward]:
    """Its rewards; raises `ConfigError` if one is malformed, or there is none."""
    listed = _entries("rewards", get("rewards"))
    if not listed:
        raise ConfigError("rewards=[] must name a reward_model")
    return [_function(f"rewards[{number}]", entries) for number, entries in enumerate(listed)]


def gold_functions(get: Given) -> list[Reward]:
    """The rewards of its evaluations that it does not train on."""
    trained = [(reward.name, reward.options) for reward in reward_functions(get)]
    listed = _entries("eval_rewards", get("eval_rewards") or [])
    scored = [_function(f"eval_rewards[{number}]", entries) for number, entries in enumerate(listed)]
    return [replace(reward, weight=1.0) for reward in scored if (reward.name, reward.options) not in trained]


def _function(key: str, entries: Mapping[str, Any]) -> Reward:
    model = entries["reward_model"]
    known = _KNOWN.get(model.lower())
    options = {
        name: value for name, value in entries.items() if name not in (*_OWN_ENTRIES, *_OF_ITS_WORKERS)
    }
    left = [name for name in entries if name in _OF_ITS_WORKERS or (known is not None and name in options)]
    return Reward(
        name=model.rpartition(".")[2] if known is None else model,
        known=known,
        weight=rewards.number(f"{key}.weight", entries.get("weight", 1.0)),
        options=options if known is None else {},
        without=[f"{key}.{name}" for name in left],
    )


def prompts_file(get: Given, split: str) -> str:
    """The file of a split: `.jsonl`, or `.txt` if there is none."""
    stem = os.path.join(get("data.dataset_dir", str), split)
    return f"{stem}.{'jsonl' if os.path.isfile(os.path.expanduser(f'{stem}.jsonl')) else 'txt'}"
