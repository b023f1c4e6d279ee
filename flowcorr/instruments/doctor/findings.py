"""Findings of the doctor's checks, and the verdict on a list of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["PASS", "WARN", "FAIL", "SKIP"]
EXIT_CODES: Mapping[str, int] = {"PASS": 0, "SKIP": 0, "WARN": 1, "FAIL": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: its name in the table of checks.
        status: SKIP where a failed check would upset this one, or there is nothing to look at.
        message: the outcome in words.
        value: the measured number, if there is one; of a check that passed, at most `threshold`.
        threshold: the number that `value` is compared with.
        remedy: what to do about it.
    """

    check: str = ""
    status: Status
    message: str
    value: float | None = None
    threshold: float | None = None
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status == "PASS" and self.value is not None:
            assert self.threshold is not None, "a number is shown with its threshold"
            assert self.value <= self.threshold, "`judged` passes no number above its threshold"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNoise:
    """The gap between both stacks at one step of the schedule, before anything was learned.

    Attributes:
        step_index: place in the schedule.
        sigma: noise level before the step.
        abs_delta: the `QUANTILES` of `|delta log p|`, nats per latent element.
        exact_kl: mean exact KL, nats per latent element.
        outside_clip: share of terms whose ratio is outside the clip range.
    """

    step_index: int
    sigma: float
    abs_delta: tuple[float, ...]
    exact_kl: float
    outside_clip: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """All findings, and the noise floor by step.

    Attributes:
        findings: one a check, in the order they were made.
        noise: one entry a step index that was seen.
        num_elements: `D`.
        clip_ratio: the configured clip range, a number or one by step index.
        images_per_second: of the rollout engine.
    """

    findings: Sequence[Finding]
    noise: Sequence[StepNoise]
    num_elements: int
    clip_ratio: float | Sequence[float]
    images_per_second: float

    @property
    def exit_code(self) -> int:
        """0 if all passed, 1 if something warned, 2 if something failed."""
        return max(EXIT_CODES[finding.status] for finding in self.findings)

    def failed(self) -> list[str]:
        """The checks that failed."""
        return [finding.check for finding in self.findings if finding.status == "FAIL"]

    def count(self, status: Status) -> int:
        """How many findings have this status."""
        return sum(finding.status == status for finding in self.findings)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON; a number that is not finite becomes null."""
        return _plain({"exit_code": self.exit_code, **asdict(self)})


def judged(
    value: float,
    limit: float,
    good: str,
    bad: str,
    remedy: str,
    *,
    fails_above: float | None = None,
) -> Finding:
    """The finding that follows from a number: PASS up to `limit`, FAIL above `fails_above`, WARN between them.

    Args:
        value: the number; NaN fails.
        limit: the largest value that passes.
        good: the message where it passes.
        bad: the message where it does not.
        remedy: what to do where it does not pass.
        fails_above: the largest value that only warns; `limit` by default, so that nothing warns.
    """
    if value <= limit:
        return Finding(status="PASS", message=good, value=value, threshold=limit)
    if fails_above is not None and value <= fails_above:
        return Finding(status="WARN", message=bad, value=value, threshold=limit, remedy=remedy)
    threshold = limit if fails_above is None else fails_above
    return Finding(status="FAIL", message=bad, value=value, threshold=threshold, remedy=remedy)


def passed(message: str) -> Finding:
    """A check that passed without a number; with one, see `judged`."""
    return Finding(status="PASS", message=message)


def failed(
    message: str, remedy: str, *, value: float | None = None, threshold: float | None = None
) -> Finding:
    """A fault that was recognised, with the number by which it was."""
    return Finding(status="FAIL", message=message, value=value, threshold=threshold, remedy=remedy)


def warned(message: str, remedy: str, *, value: float, threshold: float) -> Finding:
    """A loss of precision that was recognised, with the number by which it was."""
    return Finding(status="WARN", message=message, value=value, threshold=threshold, remedy=remedy)


def skipped(message: str) -> Finding:
    """A check that was not made."""
    return Finding(status="SKIP", message=message)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
