"""What a check found, how a list of findings is judged, and how far ratios start from 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from flowcorr.algorithm.clip_center import centered
from flowcorr.config.schema import ActorConfig
from flowcorr.losses import UNCLIPPED

QUANTILES = (0.5, 0.9, 0.99)
Status = Literal["PASS", "WARN", "FAIL", "SKIP"]
EXIT_CODES: Mapping[str, int] = {"PASS": 0, "SKIP": 0, "WARN": 1, "FAIL": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: what was looked at; the table of checks names it.
        status: SKIP where a failed check would upset this one, or there is nothing to look at.
        message: what was found, in words.
        value: the measured number, if there is one.
        threshold: what it is held against.
        remedy: what to do about it.
    """

    check: str = ""
    status: Status
    message: str
    value: float | None = None
    threshold: float | None = None
    remedy: str = ""


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
    """

    findings: Sequence[Finding]
    noise: Sequence[StepNoise]
    num_elements: int
    clip_ratio: float | Sequence[float]

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
        """Plain values for JSON; what is not finite becomes null."""
        return _plain({"exit_code": self.exit_code, **asdict(self)})


def ratio_distance(
    delta: Tensor, step_kl: Tensor, stds: Tensor, step_indices: Tensor, actor: ActorConfig
) -> Tensor:
    """`[B, T]`, `|ratio - 1|` of the ratio that the loss would start with in bypass mode.

    Args:
        delta: `[B, T]`, log-probs of the training stack less those of the rollout.
        step_kl: `[B, T]`, exact KL of the steps, nats a latent element.
        stds: `[B, T]`, of the steps.
        step_indices: `[B, T]`, places in the schedule.
        actor: the loss.
    """
    log_ratio = delta
    if actor.loss_mode == "grpo_guard":
        log_ratio = log_ratio + step_kl
    if actor.clip_center == "drift" and actor.loss_mode not in UNCLIPPED:
        log_ratio = centered(log_ratio, step_indices)
    if actor.loss_mode == "grpo_guard":
        log_ratio = log_ratio * stds
    if actor.ratio_level == "trajectory_mean":
        log_ratio = log_ratio.mean(1, keepdim=True).expand_as(log_ratio)
    if actor.ratio_level == "trajectory_sum":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    return log_ratio.expm1().abs()


def clip_key(actor: ActorConfig) -> str:
    """The key that bounds the ratio, with its value."""
    if actor.loss_mode == "importance_cap":
        return f"actor.importance_cap={actor.importance_cap:g}"
    return f"actor.clip_ratio={clip_text(actor.clip_ratio)}"


def clip_text(clip_ratio: float | Sequence[float]) -> str:
    """A clip range in words: the number, or those by step index."""
    if isinstance(clip_ratio, Sequence):
        return "[" + ", ".join(f"{value:g}" for value in clip_ratio) + "]"
    return f"{clip_ratio:g}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
