"""The interface of a reward, and the scoring of a batch when a reward fails."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias
from urllib.error import HTTPError, URLError

import numpy as np

from flowcorr.errors import BackendError, BatchError, ConfigError, MissingExtraError
from flowcorr.records import ImageArray, Prompt

logger = logging.getLogger(__name__)

OnError: TypeAlias = Literal["fail", "drop_group"]

_REMEDY = "fix the reward, or set reward.on_error: drop_group to drop the groups on which it fails"
# Mistakes in the set-up, and services that are down: no sample is to blame, and each would fail by itself.
_NO_SAMPLES_FAULT = (ConfigError, BatchError, MissingExtraError, BackendError)
REFUSED_STATUS = frozenset({400, 413, 422})
"""Of HTTP: the server is up, but refuses this request, as a content filter does, or for an image that is too large."""
_UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardOutput:
    """The scores of one batch.

    Attributes:
        scores: `[B]` float64, the numbers that the policy is trained on; not finite for failed samples.
        extra: `[B]` float64 arrays that are only logged, such as `exact_match`; NaN for samples without the number, and
            an infinite number makes a sample fail.
        terms: `[B]` float64, the score of each term of a sum, before its weight.
        errors: reasons for failed samples, by their places in the batch, as far as the reward knows them.
    """

    scores: np.ndarray
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    terms: Mapping[str, np.ndarray] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> np.ndarray:
        """`[B]` bool, samples without a score."""
        return ~np.isfinite(self.scores)

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> RewardOutput:
        """`function` of every array; the errors are left out."""
        return RewardOutput(
            scores=function(self.scores),
            extra={key: function(array) for key, array in self.extra.items()},
            terms={key: function(array) for key, array in self.terms.items()},
        )

    def at(self, rows: np.ndarray, batch_size: int) -> RewardOutput:
        """These scores at `rows` of a larger batch, and NaN in its other rows."""

        def spread(array: np.ndarray) -> np.ndarray:
            whole = np.full(batch_size, np.nan)
            whole[rows] = array
            return whole

        return replace(
            self.map(spread), errors={int(rows[place]): error for place, error in self.errors.items()}
        )

    @staticmethod
    def concatenate(parts: Sequence[RewardOutput]) -> RewardOutput:
        """Concatenate the scores of all parts; extras and terms that a part lacks are NaN."""
        sizes = [len(part.scores) for part in parts]
        ends = np.cumsum(sizes)
        return RewardOutput(
            scores=np.concatenate([part.scores for part in parts]),
            extra=_columns([part.extra for part in parts], sizes),
            terms=_columns([part.terms for part in parts], sizes),
            errors={
                int(end) - size + index: error
                for part, size, end in zip(parts, sizes, ends, strict=True)
                for index, error in part.errors.items()
            },
        )


class Reward(Protocol):
    """A function, or an instance of a class, that scores images or videos.

    Attributes:
        overlaps: `True`: a score does not depend on the thread or on other images, and scoring mostly releases Python's
            interpreter lock, so that other work goes on.
        computes_on_gpu: `True`: it computes a CLIP model on a GPU, if its process sees one and its option `device` is
            not `cpu`.
        takes_videos: `True`: it scores videos; others get images of them, see `reward.terms[].frames`. Either way it
            gets a few videos of the batch at a time.
        extras: the names that its `RewardOutput.extra` may have, one of which `trainer.best_metric` can name. A reward
            of your own without `extras` has none; one of `REWARDS` without them chooses the names while it scores.
        describe_cuts: a method, `describe_cuts(prompts)`, that returns a sentence on prompts which the reward does not
            read to their end, or None. The log says it when a run starts.
        sends_targets: of `REWARDS` only: it hands targets on, and does not know whether they are needed.
        needs_reference: of `REWARDS` only: it compares with the prompts' reference images.
        needs_target: of `REWARDS` only, a function of the options: whether every prompt that it scores needs a target.

    All are optional, and stand on the function or the class.
    """

    def __call__(self, images: ImageArray, prompts: list[Prompt], /) -> RewardOutput:
        """Score the images of `B` prompts; a term of a recipe gets a copy of them."""
        ...


def as_reward_output(value: Any, batch_size: int, name: str) -> RewardOutput:
    """Read the result of a reward: a `RewardOutput`, or a sequence, array or tensor of `B` numbers.

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
        terms=output.terms,
        errors=output.errors,
    )


def score_batch(
    reward: Reward,
    images: ImageArray,
    prompts: list[Prompt],
    *,
    on_error: OnError = "fail",
    broken: Collection[int] = (),
) -> RewardOutput:
    """Score a batch, and find the samples that cannot be scored.

    If the call for the whole batch raises, samples are scored one by one to find the ones at fault. A mistake in the
    set-up (a missing target, a missing package, scores of the wrong shape) always raises, and so do a `BackendError`
    and an error of the network: a service that is down would fail for every sample, each time after all its retries.

    Args:
        reward: the reward.
        images: of all samples.
        prompts: the `B` prompts of the images.
        on_error: `fail` raises at the first failed sample; `drop_group` marks all of them.
        broken: places of samples without a picture, which have failed already, see `report_broken`.

    Returns:
        The output, with NaN for all numbers of failed samples.

    Raises:
        BackendError: a sample failed under `fail`; the message names sample, prompt, reward and cause. Or a
            service that the reward needs is down.
        BatchError: the images have another shape or dtype, or the reward's output has another shape.
    """
    _check_images(images, prompts)
    name = reward_name(reward)
    rows = np.array([row for row in range(len(prompts)) if row not in broken], dtype=int)
    output = RewardOutput(scores=np.full(len(prompts), np.nan))
    causes: dict[int, Exception | str] = {}
    if len(rows):
        whole = images if not broken else images[rows]
        scored, row_causes = _score_whole(reward, whole, [prompts[row] for row in rows], name, on_error)
        output = scored if not broken else scored.at(rows, len(prompts))
        causes = {int(rows[place]): cause for place, cause in row_causes.items()}
    infinite = [np.isinf(array) for array in output.extra.values()]
    unusable = ~np.isfinite(output.scores) | np.any(infinite, axis=0)
    for index in rows[unusable[rows]].tolist():
        causes.setdefault(index, output.errors.get(index) or f"it returned {_scores_of(output, index)}")
    if causes:
        _report(name, prompts, causes, on_error)
    failed = np.zeros(len(prompts), dtype=bool)
    failed[[*causes, *broken]] = True
    return output.map(lambda array: np.where(failed, np.nan, array)) if failed.any() else output


def report_broken(prompts: Sequence[Prompt], broken: Mapping[int, str], on_error: OnError) -> None:
    """Treat samples without a picture as `reward.on_error` says: raise, or log the first of them.

    Args:
        prompts: of all samples.
        broken: why a sample has no picture, by its place.
        on_error: see `score_batch`, which then leaves these samples out.

    Raises:
        BackendError: there is such a sample, under `fail`.
    """
    if not broken:
        return
    index = min(broken)
    message = f"sample {index} (prompt {prompts[index].text!r}) failed: {broken[index]}"
    if on_error == "fail":
        raise BackendError(
            f"{message} ({len(broken)} of {len(prompts)} samples); or set reward.on_error: drop_group to drop the "
            "groups of such samples"
        )
    logger.warning("%s; %d of %d samples failed and are left out", message, len(broken), len(prompts))


def reward_name(reward: Any) -> str:
    """The name of a reward in messages: its `name`, or that of its function or class."""
    return getattr(reward, "name", None) or getattr(reward, "__name__", None) or type(reward).__name__


def _score_whole(
    reward: Reward, images: ImageArray, prompts: list[Prompt], name: str, on_error: OnError
) -> tuple[RewardOutput, dict[int, Exception | str]]:
    """Score a batch; returns the scores, and the errors of single samples by place."""
    try:
        return as_reward_output(reward(images, prompts), len(prompts), name), {}
    except _NO_SAMPLES_FAULT:
        raise
    except Exception as error:
        _raise_unreachable(error, name)
        output, causes = _score_one_by_one(reward, images, prompts, name, stop_at_first=on_error == "fail")
        if not causes and on_error == "fail":
            raise BackendError(
                f"reward {name} raised {_describe(error)} for the batch of {len(prompts)} samples, though it "
                f"scores each of them alone; {_REMEDY}"
            ) from error
        return output, causes


def _score_one_by_one(
    reward: Reward, images: ImageArray, prompts: list[Prompt], name: str, *, stop_at_first: bool
) -> tuple[RewardOutput, dict[int, Exception | str]]:
    outputs = [RewardOutput(scores=np.full(1, np.nan)) for _ in prompts]
    causes: dict[int, Exception | str] = {}
    for index, prompt in enumerate(prompts):
        try:
            outputs[index] = as_reward_output(reward(images[index : index + 1], [prompt]), 1, name)
        except _NO_SAMPLES_FAULT:
            raise
        except Exception as error:
            _raise_unreachable(error, name)
            causes[index] = error
            if stop_at_first:
                break
    return RewardOutput.concatenate(outputs), causes


def _raise_unreachable(error: Exception, name: str) -> None:
    """Raise `BackendError` if an error of a reward came from a service that it could not reach, or that is broken."""
    for cause in causes(error):
        told = _describe(error) + ("" if cause is error else f" ({_describe(cause)})")
        if isinstance(cause, HTTPError):
            if cause.code in REFUSED_STATUS:
                return
            text = f"its service answered with an error: {told}; see the log of that service"
        elif isinstance(cause, URLError | ConnectionError | socket.gaierror | ssl.SSLError) or (
            isinstance(cause, OSError) and cause.errno in _UNREACHABLE
        ):
            text = f"its service cannot be reached: {told}; start it, and check its address"
        else:
            continue
        raise BackendError(f"reward {name}: {text}") from error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, the outermost first: libraries wrap the error of the socket."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _columns(parts: Sequence[Mapping[str, np.ndarray]], sizes: Sequence[int]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: np.concatenate(
            [part.get(name, np.full(size, np.nan)) for part, size in zip(parts, sizes, strict=True)]
        )
        for name in names
    }


def _report(
    name: str, prompts: list[Prompt], causes: Mapping[int, Exception | str], on_error: OnError
) -> None:
    index = min(causes)
    cause = causes[index]
    what = f"it raised {_describe(cause)}" if isinstance(cause, Exception) else cause
    message = f"reward {name} failed on sample {index} (prompt {prompts[index].text!r}): {what}"
    if on_error == "fail":
        raise BackendError(f"{message}; {_REMEDY}") from (cause if isinstance(cause, Exception) else None)
    logger.warning("%s; %d of %d samples failed and are left out", message, len(causes), len(prompts))


def _scores_of(output: RewardOutput, index: int) -> str:
    parts = ", ".join(f"{key}={array[index]:g}" for key, array in output.extra.items())
    return f"{output.scores[index]:g}" + (f" ({parts})" if parts else "") + ", which is not a finite number"


def _describe(error: BaseException) -> str:
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {error}{notes}"


def _check_images(images: ImageArray, prompts: list[Prompt]) -> None:
    shape, dtype = getattr(images, "shape", None), getattr(images, "dtype", None)
    if dtype != np.uint8 or shape is None or len(shape) not in (4, 5) or shape[-1] != 3:
        raise BatchError(
            f"images have shape {shape} and dtype {dtype}; rewards take [B, H, W, 3] uint8, or videos [B, F, H, W, 3]"
        )
    if len(prompts) != shape[0]:
        raise BatchError(f"{len(prompts)} prompts were given for {shape[0]} images; give one for each")


def _as_vector(value: Any, batch_size: int, name: str) -> np.ndarray:
    if value is None:
        raise BatchError(
            f"reward {name} returned None; return one number for each of the {batch_size} images, or a RewardOutput"
        )
    if hasattr(value, "detach"):  # a tensor, maybe on a device, maybe bfloat16, which numpy does not know
        value = value.detach().double().cpu().numpy()
    if isinstance(value, list | tuple):  # its parts may be such tensors too, or have gradients
        value = [part.tolist() if hasattr(part, "detach") else part for part in value]
    try:
        # A copy: a reward may write its next scores into the same array.
        vector = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise BatchError(
            f"reward {name} returned {type(value).__name__}, which is not a sequence of numbers ({error}); "
            f"return one number for each of the {batch_size} images, or a RewardOutput"
        ) from error
    if vector.shape != (batch_size,):
        raise BatchError(
            f"reward {name} returned shape {list(vector.shape)}; one number for each image is [{batch_size}]"
        )
    return vector
