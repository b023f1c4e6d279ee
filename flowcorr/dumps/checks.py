"""The tensors of a step's file, with the rules of each, and checks of them and of the metadata.

Each `problem_of_*` returns the first problem in words, with the field, its value and what is allowed; empty if there is
none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from flowcorr.errors import BatchError
from flowcorr.records import HIGHEST_NOISE_LEVEL, concatenated, tensors_of

MAX_SCHEDULE = 1000
"""Steps of the longest schedule that a file may be of, and so of the longest window."""
MAX_BYTES = 2**32
"""The largest file that is read."""
Array = Tensor | np.ndarray | Sequence[Any]

_REQUIRED = ("rollout_log_probs", "old_log_probs", "advantages")
_WHOLE_DTYPES, REAL_DTYPES = ("I64", "I32"), ("F64", "F32", "F16", "BF16")  # as safetensors calls them
_REQUIRED_METADATA = ("step", "mode", "loss_mode")
_MODES = ("decoupled", "bypass")
_MAX_TEXT = 200
_FLOAT32 = torch.finfo(torch.float32)
_POSITIVE = f"a number above 0, at most {_FLOAT32.max:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The rules of a tensor of `DumpedTerms`.

    Attributes:
        per_sample: whether it is `[B]`; else `[B, T]`.
        shared: whether it may be given as `[T]`, where all samples have the same.
        whole: whether its numbers are whole.
        low, high: the smallest and the largest value.
        others: which other values there may be, as of a term that was left out.
    """

    per_sample: bool = False
    shared: bool = False
    whole: bool = False
    low: float = -math.inf
    high: float = math.inf
    others: Literal["none", "nan", "not finite"] = "not finite"

    def odd(self, values: Tensor) -> Tensor:
        """The values that are not allowed."""
        good = (self.low <= values) & (values <= self.high)
        if self.others != "none":
            good |= values.isnan() if self.others == "nan" else ~values.isfinite()
        return values[~good]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DumpedTerms:
    """The numbers of a training step in a file, `[B, T]` unless another shape is given; unknown columns are None.

    `flowcorr.instruments.steps` makes of it the `Terms` that losses and corrections read. Log-probs and exact KLs are
    in nats per latent element. A log-prob that is not finite is a term that was left out.

    Attributes:
        rollout_log_probs: of the rollout policy.
        old_log_probs: of the old policy, in the PPO ratio: recomputed in decoupled mode, the rollout's in bypass.
        advantages: `[B]`, before rejection.
        current_log_probs: of the current policy, as the loss used them last; NaN if not finite. With one epoch they are
            scored with the term's mini-batch. In decoupled mode those of the first mini-batch therefore equal the old
            ones, if the old policy has the current weights (`actor.old_policy`).
        before_update: 1 where the term of `current_log_probs` was scored before the step's first update, so that it
            holds nothing that was learned from the batch; else 0.
        rewards: `[B]`, the values that `reward/mean` averages; with `rollout.n_learned` those of the chosen samples.
        timesteps, sigmas, sigmas_next, step_indices: as in `Rollout`.
        stds: full standard deviations of the steps.
        group_ids, policy_versions, worker_ids: `[B]`, as in `Rollout`.
        old_rollout_kl: exact KL of the old policy from the rollout policy.
        current_old_kl: exact KL of the current policy from the old policy.
        current_rollout_kl: exact KL of the current policy from the rollout policy.
        drift_squares, gradient_squares: see `flowcorr.algorithm.drift_squares`; NaN if not measured.
        num_elements: `D`.
        version: of the trainer's weights when the step began, counted as `policy_versions` are.
        bypass: whether the step was in bypass mode.
    """

    rollout_log_probs: Annotated[Tensor, Column()]
    old_log_probs: Annotated[Tensor, Column()]
    advantages: Annotated[
        Tensor, Column(per_sample=True, low=-_FLOAT32.max, high=_FLOAT32.max, others="none")
    ]
    current_log_probs: Annotated[Tensor | None, Column()] = None
    before_update: Annotated[Tensor | None, Column(whole=True, low=0, high=1, others="none")] = None
    rewards: Annotated[Tensor | None, Column(per_sample=True)] = None
    timesteps: Annotated[Tensor | None, Column()] = None
    sigmas: Annotated[Tensor | None, Column(shared=True, low=0, high=HIGHEST_NOISE_LEVEL, others="none")] = (
        None
    )
    sigmas_next: Annotated[Tensor | None, Column(low=0, high=HIGHEST_NOISE_LEVEL, others="none")] = None
    stds: Annotated[
        Tensor | None, Column(shared=True, low=_FLOAT32.tiny, high=_FLOAT32.max, others="nan")
    ] = None
    step_indices: Annotated[
        Tensor | None, Column(shared=True, whole=True, low=0, high=MAX_SCHEDULE - 1, others="none")
    ] = None
    group_ids: Annotated[Tensor | None, Column(per_sample=True, whole=True)] = None
    policy_versions: Annotated[Tensor | None, Column(per_sample=True, whole=True)] = None
    worker_ids: Annotated[Tensor | None, Column(per_sample=True, whole=True)] = None
    old_rollout_kl: Annotated[Tensor | None, Column(low=0)] = None
    current_old_kl: Annotated[Tensor | None, Column(low=0)] = None
    current_rollout_kl: Annotated[Tensor | None, Column(low=0)] = None
    drift_squares: Annotated[Tensor | None, Column(low=0)] = None
    gradient_squares: Annotated[Tensor | None, Column(low=0)] = None
    num_elements: int | None = None
    version: int | None = None
    bypass: bool = False

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name; a field that is None is left out."""
        return tensors_of(self)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """The samples of all parts in order; all parts must have the same optional tensors."""
        return concatenated(parts)


COLUMNS: Mapping[str, Column] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(DumpedTerms, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""The tensors of a file by name."""


def as_tensor(name: str, values: Array) -> Tensor:
    """The numbers of a field as a tensor on the CPU, which may share their memory.

    Raises:
        BatchError: they are no numbers, or their rows differ in length.
    """
    try:
        if isinstance(values, Sequence) and values and all(isinstance(row, Tensor) for row in values):
            # numpy refuses rows with a graph, on a GPU or in bfloat16.
            values = torch.stack([row.detach().cpu() for row in values])
        return values.detach().cpu() if isinstance(values, Tensor) else torch.as_tensor(np.array(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(
            f"{name} is no array of numbers: {str(error).splitlines()[0]}; give a tensor, a numpy array or nested "
            "lists of numbers, with rows of one length and without None"
        ) from error


def problem_of_metadata(metadata: Mapping[str, str]) -> str:
    """The problem of the metadata, apart from `format_version`; empty if there is none."""
    for name, (allowed, is_allowed) in _METADATA.items():
        if name not in metadata and name in _REQUIRED_METADATA:
            return f"{name} is missing from its metadata; it must be {allowed}"
        if name in metadata and not is_allowed(metadata[name]):
            return f"{name}={shown(str(metadata[name]))} must be {allowed}"
    return ""


def problem_of_header(header: Mapping[str, tuple[Sequence[int], str]]) -> str:
    """The problem of the tensors, before any is read; empty if there is none.

    Args:
        header: shape and dtype of each, as safetensors tells them.
    """
    for name in _REQUIRED:
        if name not in header:
            return f"{name} is missing"
    shape, _ = header["rollout_log_probs"]
    if problem := problem_of_shape(shape):
        return problem
    for name, (own_shape, dtype) in header.items():
        column = COLUMNS[name]
        expected = shape[:1] if column.per_sample else shape
        if list(own_shape) != list(expected):
            return f"{name} has shape {list(own_shape)}; it must be {list(expected)}"
        dtypes = _WHOLE_DTYPES if column.whole else REAL_DTYPES
        if dtype not in dtypes:
            return f"{name} has dtype {dtype}; it must be {' or '.join(dtypes)}"
    return ""


def problem_of_shape(shape: Sequence[int]) -> str:
    """The problem of the shape of the log-probs; empty if there is none."""
    if len(shape) == 2 and shape[0] and 0 < shape[1] <= MAX_SCHEDULE:
        return ""
    return f"rollout_log_probs has shape {list(shape)}; it must be [B, T], with B from 1 and T from 1 to {MAX_SCHEDULE}"


def problem_of_values(tensors: Mapping[str, Tensor], version: int | None) -> str:
    """The first problem of the tensors' values, or of their versions against `version`; empty if there is none."""
    for name, values in tensors.items():
        column = COLUMNS[name]
        odd = column.odd(values)
        if len(odd):
            return f"{name} holds {odd[0].item():g}; it must lie from {column.low:g} to {column.high:g}"
    newest = int(tensors["policy_versions"].max()) if "policy_versions" in tensors else None
    if newest is not None and version is not None and newest > version:
        return (
            f"policy_versions holds {newest}, and version={version}: weights that sampled cannot be newer than the "
            "trainer's; count both alike, before the step's first update"
        )
    return _problem_of_levels(tensors)


def _problem_of_levels(tensors: Mapping[str, Tensor]) -> str:
    """Noise levels that rise along the schedule, as times that run from noise to image do."""
    if not {"sigmas", "step_indices"} <= tensors.keys():
        return ""
    steps, order = tensors["step_indices"].sort(1)
    sigmas = tensors["sigmas"].gather(1, order)
    rising = ((sigmas.diff(dim=1) > 0) & (steps.diff(dim=1) > 0)).nonzero()
    if not len(rising):
        return ""
    row, place = rising[0].tolist()
    before, after = (f"{sigmas[row, at]:g} at step {steps[row, at]}" for at in (place, place + 1))
    return f"sigmas holds {before} and {after}; noise levels descend along the schedule, from noise at 1 to images at 0"


def problem_of_log_probs(rollout: Tensor, old: Tensor, *, bypass: bool) -> str:
    """The problem of `[B, T]` rollout and old log-probs, that they are of another mode; empty if there is none."""
    finite = rollout.isfinite() & old.isfinite()
    if bypass and not torch.equal(rollout[finite].float(), old[finite].float()):
        return "mode='bypass' says that old_log_probs are the rollout's, and they differ"
    return ""


def shown(text: str) -> str:
    """The beginning of a text, as it may stand in a message of one line."""
    return repr(text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}...")


def json_value(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_whole(text: str, low: int) -> bool:
    return bool(re.fullmatch("[0-9]{1,12}", text)) and low <= int(text)


def _is_name(text: str) -> bool:
    return isinstance(text, str) and text != "" and text.isprintable()


def _is_clip_ratio(text: str) -> bool:
    value = json_value(text)
    numbers = value if isinstance(value, list) else [value]
    return bool(numbers) and all(map(_is_positive, numbers))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _FLOAT32.max


# By field: what is allowed, in words, and whether a text is that.
_METADATA: dict[str, tuple[str, Callable[[str], bool]]] = {
    "step": ("a whole number below 1e12", partial(_is_whole, low=0)),
    "mode": (" or ".join(_MODES), _MODES.__contains__),
    "loss_mode": ("a name", _is_name),
    "num_elements": ("a whole number from 1, below 1e12", partial(_is_whole, low=1)),
    "version": ("a whole number below 1e12", partial(_is_whole, low=0)),
    "clip_ratio": (f"{_POSITIVE}, or a list of such numbers", _is_clip_ratio),
    "adv_clip_max": (_POSITIVE, lambda text: _is_positive(json_value(text))),
}


def problem_of_step(tensors: Mapping[str, Tensor], clip_ratio: float | Sequence[float] | None) -> str:
    """The problem of a KL without the log-probs of its policy, or of a list of clip ranges that lacks a step."""
    if "current_rollout_kl" in tensors and "current_log_probs" not in tensors:
        return (
            "old_rollout_kl was given without old_log_probs, whose policy is then that of the rollout, from which it "
            "has no KL; give old_log_probs too, or current_log_probs with the KL of their policy"
        )
    indices = tensors.get("step_indices")
    last = tensors["rollout_log_probs"].shape[1] - 1 if indices is None else int(indices.max())
    if not isinstance(clip_ratio, Sequence) or last < len(clip_ratio):
        return ""
    reach = f"the window has {last + 1} steps" if indices is None else f"step_indices reaches {last}"
    return (
        f"clip_ratio holds {len(clip_ratio)} values, and {reach}; give one value for each step of the schedule, from "
        "its first step on, or one number"
    )
