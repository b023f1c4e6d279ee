"""Other inputs with which samples may have been made, and the search for those that explain a gap.

A candidate is a row: the cause, how to build the other inputs, and the words. The rows for captured samples are in
`hypotheses`, those for an engine at hand in `other_inputs`. Both searches are this one: they differ in the inputs, and
in how a gap is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from flowcorr.instruments.doctor.exam import Evidence

Other = TypeVar("Other")
"""Inputs that are not those of the training stack."""
_CLEARLY = 10.0  # times that the named cause leaves less of the gap than another, and a fitted number than a plain one
_TRIES = 10
_DESCENTS = 3  # starts, at most, from which a number is looked for
_DEEP = 1e-2  # share of a start's mean square below which its way down is followed to the end
_STEP = 0.01  # share of a start, for the first derivative
_SETTLED = 1e-7  # relative: closer numbers are one in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Generic[Other]):
    """A number of the inputs that may be another, and is found as the one that leaves the least of the gap.

    Attributes:
        inputs: the other inputs, of a number.
        starts: numbers to begin with.
        low, high: the range in which it means something.
    """

    inputs: Callable[[float], Other]
    starts: tuple[float, ...]
    low: float
    high: float

    def fitted(self, residuals: Callable[[Other], Tensor]) -> float:
        """The number in the range with the smallest sum of squared residuals near the best start.

        Where the way down from the best start ends early, as in a valley of its own, the next ones are tried.

        Args:
            residuals: of the inputs, float64 of any shape.
        """

        def of(value: float) -> Tensor:
            return residuals(self.inputs(value)).flatten()

        tried = {start: of(start) for start in self.starts}
        best, least = self.starts[0], math.inf
        for start in sorted(self.starts, key=lambda value: _size(tried[value]))[:_DESCENTS]:
            value, size = _descended(of, start, tried[start], self.low, self.high)
            if size < least:
                best, least = value, size
            if least < _DEEP * _size(tried[start]):
                break
        return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[Other]):
    """Other inputs, with which the samples may have been made.

    Attributes:
        cause: that the finding names; of an engine at hand, the check.
        message: with what a side would have computed, in words; `{value:.4g}` stands for a number.
        remedy: what to do then; empty where that is the check's.
        numbers: the same as data; `fitted` is the number that was found.
        inputs: the other inputs; of several, each sample may have one of its own unless the candidate is `whole`.
        whole: whether all samples would have been made with the same of them.
        fitted: whether the inputs were fitted to the gap.
        about: the input that differs. A number is looked for only where no other candidate about it explains the gap.
        number: the number that differs, in place of `inputs`.
    """

    cause: str
    message: str
    remedy: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Other, ...] = ()
    whole: bool = True
    fitted: bool = False
    about: str = ""
    number: Number[Other] | None = None

    def with_number(self, residuals: Callable[[Other], Tensor] | None) -> Candidate[Other]:
        """The inputs of the number that leaves the least of the residuals; itself where it has none."""
        if self.number is None:
            return self
        assert residuals is not None, "a search among numbers has residuals"
        value = self.number.fitted(residuals)
        return replace(
            self,
            message=self.message.format(value=value),
            numbers={**self.numbers, "fitted": value},
            inputs=(self.number.inputs(value),),
            fitted=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tried(Generic[Other]):
    """The gap that a candidate leaves.

    Attributes:
        candidate: with its best inputs, if it is `whole`.
        score: `[n]`, the gap of each sample that is left, in the unit of the search.
        left: of all samples, the smaller the better.
        explains: whether the gap disappears.
        exact: whether it disappears so far that no number does by chance.
        evidence: why the candidate is accepted, where that is more than a smaller gap.
    """

    candidate: Candidate[Other]
    score: Tensor
    left: float
    explains: bool
    exact: bool = False
    evidence: Evidence | None = None

    @property
    def _rank(self) -> tuple[bool, float]:
        """Explaining ones first; a fitted number fits some of any gap."""
        return not self.explains, self.left * (_CLEARLY if self.candidate.fitted else 1.0)


def search(
    candidates: Iterable[Candidate[Other]],
    attempt: Callable[[Candidate[Other]], Tried[Other]],
    residuals: Callable[[Other], Tensor] | None = None,
) -> list[Tried[Other]]:
    """All candidates that were tried, the best first.

    A number takes many tries. It is looked for last, and not where an exact candidate explains the gap already, or one
    about the same input.

    Args:
        candidates: the rows.
        attempt: measures the gap that a row with its inputs leaves.
        residuals: of inputs, float64 of any shape, of which a number leaves the least; None where no row has a number.
    """
    tried: list[Tried[Other]] = []
    for candidate in sorted(candidates, key=lambda one: one.number is not None):
        explaining = (one for one in tried if one.explains)
        if candidate.number is not None and any(
            one.exact or one.candidate.about == candidate.about != "" for one in explaining
        ):
            continue
        tried.append(attempt(candidate.with_number(residuals)))
    return sorted(tried, key=lambda one: one._rank)


def best(tried: Sequence[Tried[Other]]) -> Tried[Other] | None:
    """The best of the sorted candidates, if it explains the gap."""
    return tried[0] if tried and tried[0].explains else None


def clearly_best(tried: Sequence[Tried[Other]]) -> Tried[Other] | None:
    """The best one, if no candidate of another cause explains the gap nearly as well."""
    first = best(tried)
    if first is None:
        return None
    others = (one for one in tried if one.explains and one.candidate.cause != first.candidate.cause)
    return first if all(_CLEARLY * first.left <= one.left for one in others) else None


def _descended(
    residuals: Callable[[float], Tensor], start: float, of_start: Tensor, low: float, high: float
) -> tuple[float, float]:
    """The best number that secant steps find from a start, and the mean square of the flat residuals that it leaves."""
    best, least = start, _size(of_start)
    now, of_now = start, of_start
    step = _STEP * max(abs(now), _STEP)
    before = now + step if now + step <= high else now - step
    of_before = residuals(before)
    for _ in range(_TRIES):
        slope = (of_now - of_before) / (now - before)
        curvature = float(slope @ slope)
        if not curvature > 0:
            break
        following = min(max(now - float(slope @ of_now) / curvature, low), high)
        if abs(following - now) <= _SETTLED * abs(now):
            break
        of_following = residuals(following)
        if _size(of_following) > _size(of_now):  # too far: halfway back
            following = (now + following) / 2
            of_following = residuals(following)
        before, of_before, now, of_now = now, of_now, following, of_following
        if _size(of_now) < least:
            best, least = now, _size(of_now)
    return best, least


def _size(values: Tensor) -> float:
    return float(values.square().mean())
