"""What a reward is, and how a batch is scored when rewards fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from flowcorr.errors import BackendError, BatchError, ConfigError, MissingExtraError
from flowcorr.records import Prompt

logger = logging.getLogger(__name__)

OnError: TypeAlias = Literal["fail", "drop_group"]

_REMEDY = "mend the reward, or set reward.on_error: drop_group to go on without the groups that it fails on"
# Mistakes in the set-up: every sample would fail, and no later step could succeed.
_SETUP_ERRORS = (ConfigError, BatchError, MissingExtraError)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardOutput:
    """The scores of one batch.

    Attributes:
        scores: `[B]` float64, what the policy is trained on.
        extra: `[B]` float64 arrays that are only logged, such as `exact_match`.
    """

    scores: np.ndarray
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)


Reward: TypeAlias = Callable[[np.ndarray, list[Prompt]], RewardOutput]
"""Called with images `[B, H, W, 3]` uint8 and their `B` prompts."""


def as_reward_output(value: Any, batch_size: int, name: str) -> RewardOutput:
    """Read what a reward returned: a `RewardOutput`, or a sequence, array or tensor of `B` numbers.

    Raises:
        BatchError: it is not `B` numbers.
    """
    output = value if isinstance(value, RewardOutput) else RewardOutput(scores=value)
    return RewardOutput(
        scores=_as_vector(output.scores, batch_size, name),
        extra={
            key: _as_vector(array, batch_size, f"{name}.extra[{key!r}]")
            for key, array in output.extra.items()
        },
    )


def score_batch(
    reward: Reward, images: np.ndarray, prompts: list[Prompt], *, on_error: OnError = "fail"
) -> tuple[RewardOutput, np.ndarray]:
    """Score a batch, and find the samples that cannot be scored.

    Where the call for the whole batch raises, samples are scored one by one to find those that are to blame.
    A mistake in the set-up (a missing target, a missing package, scores of the wrong shape) always raises.

    Args:
        reward: the reward.
        images: `[B, H, W, 3]` uint8.
        prompts: the `B` prompts of the images.
        on_error: `fail` raises at the first failed sample; `drop_group` marks all of them.

    Returns:
        The output, NaN where a sample failed, and `[B]` bool, True where it did.

    Raises:
        BackendError: a sample failed under `fail`; the message names sample, prompt, reward and cause.
        BatchError: the images are not `[B, H, W, 3]` uint8, or the reward's output has another shape.
    """
    _check_images(images, prompts)
    name = reward_name(reward)
    try:
        output = as_reward_output(reward(images, prompts), len(prompts), name)
        causes: dict[int, Exception | str] = {}
    except _SETUP_ERRORS:
        raise
    except Exception as error:
        output, causes = _score_one_by_one(reward, images, prompts, name, stop_at_first=on_error == "fail")
        if not causes and on_error == "fail":
            raise BackendError(
                f"reward {name} raised {_describe(error)} for the batch of {len(prompts)} samples, though it "
                f"scores each of them alone; {_REMEDY}"
            ) from error
    for index in np.flatnonzero(~np.isfinite(output.scores)).tolist():
        causes.setdefault(index, f"it returned {_scores_of(output, index)}")
    if causes:
        _report(name, prompts, causes, on_error)
    failed = np.zeros(len(prompts), dtype=bool)
    failed[list(causes)] = True
    return _with_nan(output, failed), failed


def reward_name(reward: Any) -> str:
    """The name of a reward in messages: its `name`, or that of its function or class."""
    return getattr(reward, "name", None) or getattr(reward, "__name__", None) or type(reward).__name__


def _score_one_by_one(
    reward: Reward, images: np.ndarray, prompts: list[Prompt], name: str, *, stop_at_first: bool
) -> tuple[RewardOutput, dict[int, Exception | str]]:
    scored: dict[int, RewardOutput] = {}
    causes: dict[int, Exception | str] = {}
    for index, prompt in enumerate(prompts):
        try:
            scored[index] = as_reward_output(reward(images[index : index + 1], [prompt]), 1, name)
        except _SETUP_ERRORS:
            raise
        except Exception as error:
            causes[index] = error
            if stop_at_first:
                break
    return _gather(scored, len(prompts)), causes


def _gather(scored: Mapping[int, RewardOutput], batch_size: int) -> RewardOutput:
    keys = {key: None for output in scored.values() for key in output.extra}
    scores = np.full(batch_size, np.nan)
    extra = {key: np.full(batch_size, np.nan) for key in keys}
    for index, output in scored.items():
        scores[index] = output.scores[0]
        for key, array in output.extra.items():
            extra[key][index] = array[0]
    return RewardOutput(scores=scores, extra=extra)


def _report(
    name: str, prompts: list[Prompt], causes: Mapping[int, Exception | str], on_error: OnError
) -> None:
    index = min(causes)
    cause = causes[index]
    what = f"it raised {_describe(cause)}" if isinstance(cause, Exception) else cause
    message = f"reward {name} failed on sample {index} (prompt {prompts[index].text!r}): {what}"
    if on_error == "fail":
        raise BackendError(f"{message}; {_REMEDY}") from (cause if isinstance(cause, Exception) else None)
    logger.warning(
        "%s; %d of %d samples failed, and their groups are dropped", message, len(causes), len(prompts)
    )


def _with_nan(output: RewardOutput, failed: np.ndarray) -> RewardOutput:
    if not failed.any():
        return output
    return RewardOutput(
        scores=np.where(failed, np.nan, output.scores),
        extra={key: np.where(failed, np.nan, array) for key, array in output.extra.items()},
    )


def _scores_of(output: RewardOutput, index: int) -> str:
    parts = ", ".join(f"{key}={array[index]:g}" for key, array in output.extra.items())
    return f"{output.scores[index]:g}" + (f" ({parts})" if parts else "") + ", which is no finite number"


def _describe(error: BaseException) -> str:
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {error}{notes}"


def _check_images(images: np.ndarray, prompts: list[Prompt]) -> None:
    shape, dtype = getattr(images, "shape", None), getattr(images, "dtype", None)
    if dtype != np.uint8 or shape is None or len(shape) != 4 or shape[-1] != 3:
        raise BatchError(f"images have shape {shape} and dtype {dtype}; rewards take [B, H, W, 3] uint8")
    if len(prompts) != shape[0]:
        raise BatchError(f"{len(prompts)} prompts were given for {shape[0]} images; give one for each")


def _as_vector(value: Any, batch_size: int, name: str) -> np.ndarray:
    if hasattr(value, "detach"):  # a tensor, maybe on a device, maybe bfloat16, which numpy does not know
        value = value.detach().double().cpu().numpy()
    try:
        vector = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BatchError(
            f"reward {name} returned {type(value).__name__}, which is not a sequence of numbers ({error}); "
            f"return one number for each of the {batch_size} images, or a RewardOutput"
        ) from error
    if vector.shape != (batch_size,):
        raise BatchError(
            f"reward {name} returned shape {list(vector.shape)}; one number for each image is [{batch_size}]"
        )
    return vector
