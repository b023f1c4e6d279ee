"""The healthy ranges of metrics, in the units of a run; they are numbers, and need no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowcorr.instruments.metrics.metric import Metric, Rule
from flowcorr.instruments.metrics.table import METRICS
from flowcorr.rollout.precision import LARGEST_DISTANCE

_UNBOUNDED = (-math.inf, math.inf)
_ROUNDED = 1e-5  # nats a latent element: the rounding of a log-prob in float32
_NOISE_ERRORS = 6.0  # standard errors; chance exceeds this once in 5e8 steps
_TAILS_OF_GAP = 30.0  # mean fourth power of a gap's elements beside `r^4`: 3 if they are normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The settings of a run that its limits depend on.

    Attributes:
        cap: cap of the importance weights; None without weights or without a single cap.
        weighted: whether weights multiply the loss; otherwise they are only logged.
        bypass: whether the ratio that PPO clips contains drift 1, so that noise can fill the clip range.
        clip_range: the key of the clip range, with its value.
        num_terms: SDE steps whose noise a training step measures: `B T`, or in bypass mode those of the first update.
        num_elements: `D`; None if the run did not log it. Then step noise is not judged.
        densities: whether log-probs are densities, so that their differences bound the distance of the step means.
        usual_gap: the largest gap of both stacks' velocities that their precision explains.
        usual_distance: the largest distance of both stacks' step means, in stds, that their precision explains.
        rounding: by rule, the largest value that rounding explains.
        rows: the metrics, with the rules that judge them.
    """

    cap: float | None = None
    weighted: bool = True
    bypass: bool = False
    clip_range: str = ""
    num_terms: int = 1
    num_elements: int | None = None
    densities: bool = True
    usual_gap: float = math.inf
    usual_distance: float = LARGEST_DISTANCE
    rounding: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[Metric] = METRICS

    @property
    def rules(self) -> list[Rule]:
        """The rules, in the order of their metrics."""
        return [metric.rule for metric in self.rows if metric.rule is not None]

    def rule_of(self, metric: str) -> Rule | None:
        """The rule that judges a metric, if any; one of the whole update has that of the same metric before it."""
        names = (metric, metric.removeprefix("actor/"))
        found = [next((row for row in self.rows if row.name == name), None) for name in names]
        return next((row.rule for row in found if row is not None), None)


def healthy_range(metric: str, units: Units) -> tuple[float, float]:
    """The healthy range of a logged metric; infinite where it has no limit.

    Args:
        metric: its full name.
        units: the run's units.
    """
    rule = units.rule_of(metric)
    return _UNBOUNDED if rule is None else limits_of(rule, units)


def serious_limit(metric: str, units: Units) -> float:
    """The value above which a metric is serious; infinite if there is none."""
    rule = units.rule_of(metric)
    return math.inf if rule is None else rule.serious


def limits_of(rule: Rule, units: Units, mean_gap: float = 0.0) -> tuple[float, float]:
    """The range of a metric, where the step means of both policies are at most `mean_gap` stds apart."""
    if rule.name == "kl":
        return _kl_limits(units)
    if rule.name == "cap":
        return -math.inf, math.inf if units.cap is None else units.cap
    if rule.name == "replay_window":
        return -math.inf, units.usual_gap
    if rule.name in units.rounding:
        return -math.inf, units.rounding[rule.name]
    if rule.name.startswith("noise_"):
        return _noise_limits(rule, units, mean_gap)
    if rule.name == "bookkeeping" and not units.densities:
        return _UNBOUNDED
    return rule.low, rule.high


def _kl_limits(units: Units) -> tuple[float, float]:
    """The range of the mean of `-delta`, whose step means are at most `usual_distance` stds apart, and its error."""
    distance = units.usual_distance
    error = 0.0
    if units.num_elements is not None:
        error = _NOISE_ERRORS * distance / math.sqrt(units.num_elements * units.num_terms)
    high = distance**2 / 2 + error + _ROUNDED
    return -high, high


def mean_gap_of(metrics: Mapping[str, Any], units: Units) -> float:
    """An upper bound of `r`, the distance of both policies' step means in stds; infinite where it is not known.

    `delta = -r^2/2 + r z / sqrt(D)` with a normal `z`, so that neither `r^2/2` nor `sqrt(2/pi) r / sqrt(D)` exceeds the
    mean of `|delta|`.
    """
    distance = metrics.get("rollout_corr/logprob_abs_diff_mean")
    if distance is None or not distance >= 0 or units.num_elements is None or not units.densities:
        return math.inf
    return min(math.sqrt(2 * distance), math.sqrt(math.pi / 2 * units.num_elements) * distance)


def _noise_limits(rule: Rule, units: Units, mean_gap: float) -> tuple[float, float]:
    """The range of standard normal noise over the elements of a training step."""
    if units.num_elements is None:
        return _UNBOUNDED
    # A sum of squares has a longer tail on the right: 8 standard errors there are as rare as 6 of a normal variable.
    shared = 1 + (_NOISE_ERRORS + 2) * math.sqrt(2 / units.num_elements)
    count = units.num_elements * units.num_terms
    error = _NOISE_ERRORS / math.sqrt(count)
    tails = math.sqrt(24) * error  # the variance of the fourth Hermite polynomial is 4!
    square = mean_gap * mean_gap  # infinite for the largest floats, where a power would raise an error
    # What equal or similar differences of the step means of all terms would add.
    ranges = {
        "noise_std": (1 - error / math.sqrt(2), 1 + error / math.sqrt(2)),
        "noise_mean": (-error - mean_gap, error + mean_gap),
        "noise_tails": (-tails, tails * skew(count) + _TAILS_OF_GAP * square * square),
        "noise_shared": (-math.inf, shared + units.num_terms * square),
    }
    return ranges[rule.name]


def skew(count: int) -> float:
    """How many times farther than a normal variable the mean fourth moment of `count` elements goes to the right.

    In 20,000 draws of 256 to 65,536 normal elements it stays below this factor.
    """
    return 1 + 16 / math.sqrt(count)
