"""A rule of a metric: its limits, its sentence and its remedy stand in its row, and nothing asks for it by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from flowcorr.health.finding import LEVELS, Finding, Level
from flowcorr.rollout.precision import LARGEST_DISTANCE, LARGEST_GAP

if TYPE_CHECKING:
    from flowcorr.config.schema import Config
    from flowcorr.questions.question import Question

DOCTOR = "find the cause with `flowcorr doctor` first"
PERSISTENT = 3  # consecutive steps; a single one may be chance
VELOCITY_DISTANCE = "rollout/velocity_distance"  # the metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The settings of a run that its limits depend on.

    Attributes:
        config: the run's configuration; None for another trainer's.
        cap: cap of the importance weights; infinite without weights or without a single cap.
        weighted: whether weights multiply the loss; otherwise they are only logged.
        bypass: whether the ratio that PPO clips contains drift 1, so that noise can fill the clip range.
        clip_range: the key of the clip range, with its value.
        num_terms: SDE steps whose noise a training step measures: `B T`, or in bypass mode those of the first update.
        num_elements: `D`; None if the run did not log it. Then step noise is not judged.
        densities: whether log-probs are densities, so that their differences bound the distance of the step means.
        usual_gap: the largest gap of both stacks' velocities that their precision explains.
        usual_distance: the largest distance of both stacks' step means, in stds, that their precision explains: in the
            training step that is judged, or in the first one for the limits of a whole run.
        mean_gap: an upper bound of `r`, the distance of both policies' step means in stds, in the training step that is
            judged; 0 for the limits of a whole run.
    """

    config: Config | None = None
    cap: float = math.inf
    weighted: bool = True
    bypass: bool = False
    clip_range: str = ""
    num_terms: int = 1
    num_elements: int | None = None
    densities: bool = True
    usual_gap: float = math.inf
    usual_distance: float = LARGEST_DISTANCE
    mean_gap: float = 0.0

    def with_velocities(self, metrics: Mapping[str, Any]) -> Self:
        """Set the explained distance of step means from the length of a training step's velocities, if logged."""
        moved = metrics.get(VELOCITY_DISTANCE)
        return (
            self if moved is None else replace(self, usual_distance=min(self.usual_gap, LARGEST_GAP) * moved)
        )

    def of_step(self, metrics: Mapping[str, Any]) -> Self:
        """The units of a training step; an unknown `mean_gap` is infinite.

        `delta = -r^2/2 + r z / sqrt(D)` with a normal `z`, so that neither `r^2/2` nor `sqrt(2/pi) r / sqrt(D)` exceeds
        the mean of `|delta|`.
        """
        distance = metrics.get("rollout_corr/logprob_abs_diff_mean")
        if distance is None or not distance >= 0 or self.num_elements is None or not self.densities:
            return replace(self.with_velocities(metrics), mean_gap=math.inf)
        bound = min(math.sqrt(2 * distance), math.sqrt(math.pi / 2 * self.num_elements) * distance)
        return replace(self.with_velocities(metrics), mean_gap=bound)


Limit = float | Callable[[Units], float]
"""A number, or a function of the run's units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The healthy range of a metric.

    Weights and rejection are judged as they were applied, by limits that are common in rollout correction of language
    models.

    Attributes:
        name: name of the rule. Of a metric that every run logs, everything that is left out is that of its own rule,
            but for `low`, `high`, `serious` and `patience`.
        what: the metric in words.
        low, high: the healthy range: numbers, or functions of the run's `Units`.
        serious: limit above which the finding is serious.
        fault: the multiple of a limit beyond which only a fault explains the value, so that a training run stops; 1 of
            an equality. Infinite where chance, learning or precision may explain any value.
        advice: what to do outside the range.
        applied: judge the metric of the whole update, `actor/rollout_corr/`, if it is logged; charts show both.
        patience: consecutive steps outside the range that make a finding.
        each_time: whether each such step is told, and not only the first.
        noted: why the finding is a mere note in a run with these `Units`, which takes the place of the advice; empty
            where it is more. None if it always is.
        numbers: further numbers of the finding, from the `Units` and the metrics of the step; None without any.
        hides: names of rules whose metrics have the same fault in them.
        metric: the full name of the metric, which its row sets.
    """

    name: str = ""
    what: str = ""
    advice: str = ""
    low: Limit = -math.inf
    high: Limit = math.inf
    serious: float = math.inf
    fault: Limit = math.inf
    applied: bool = False
    patience: int = 1
    each_time: bool = False
    noted: Callable[[Units], str] | None = None
    numbers: Callable[[Units, Mapping[str, Any]], Mapping[str, Any]] | None = None
    hides: tuple[str, ...] = ()
    metric: str = ""

    @classmethod
    def of(cls, question: Question) -> Self:
        """The rule of a question."""
        return cls(
            name=question.name,
            what=question.what,
            high=question.limit,
            fault=question.fault,
            advice=question.advice,
        )

    def limits(self, units: Units) -> tuple[float, float]:
        """The healthy range in a run; a side without a limit is infinite."""
        low, high = (limit(units) if callable(limit) else limit for limit in (self.low, self.high))
        return low, high

    def proves(self, value: float, units: Units) -> bool:
        """Whether only a fault explains a value in a run."""
        times = self.fault(units) if callable(self.fault) else self.fault
        if math.isinf(times):
            return False
        low, high = self.limits(units)
        return value > times * high or value < (times * low if low < 0 else low / times)

    def judge(self, metrics: Mapping[str, Any], units: Units) -> BrokenRule | None:
        """The break of this rule by a training step; None within the range, or if the metric is missing or null.

        Args:
            metrics: of the step.
            units: of the step.
        """
        applied = f"actor/{self.metric}"
        metric = applied if self.applied and applied in metrics else self.metric
        value = metrics.get(metric)
        if value is None:
            return None
        low, high = self.limits(units)
        if low <= value <= high:
            return None
        serious, note = value > self.serious, self.noted(units) if self.noted else ""
        limit = self.serious if serious else low if value < low else high
        more = self.numbers(units, metrics) if self.numbers else {}
        return self.broken(
            f"{self.what} is {'below' if value < low else 'above'} its limit",
            {"metric": metric, "value": value, "limit": limit, **more},
            beyond=abs(value - limit),
            level="note" if note else "serious" if serious else "warning",
            remedy=note,
            fault=self.proves(value, units),
        )

    def broken(
        self,
        sentence: str,
        numbers: Mapping[str, Any],
        *,
        beyond: float,
        level: Level = "warning",
        remedy: str = "",
        part: str = "",
        fault: bool = False,
    ) -> BrokenRule:
        """A break of this rule; the remedy is its advice unless there is another."""
        finding = Finding(
            level=level,
            cause=self.name,
            sentence=sentence,
            numbers=numbers,
            remedy=remedy or self.advice,
            fault=fault,
        )
        return BrokenRule(rule=self, finding=finding, beyond=beyond, part=part)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """A rule that a training step breaks.

    Attributes:
        rule: the rule.
        finding: what is told of it.
        beyond: how far the value is beyond its limit.
        part: the part of the run that is at fault, of a rule that judges several, such as a worker.
    """

    rule: Rule
    finding: Finding
    beyond: float
    part: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The cause and the part, which are told once."""
        return self.finding.cause, self.part

    @property
    def badness(self) -> tuple[int, float]:
        """The level, and within it the distance from the limit: the larger, the worse."""
        return -LEVELS.index(self.finding.level), self.beyond
