"""Applies the rules of metrics and the rules of several steps to a finished run, or to a run during training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from flowcorr.config.schema import Config
from flowcorr.health.finding import LEVELS, Finding, Level
from flowcorr.health.image_drift import DriftDetector
from flowcorr.health.jumps import JumpDetector
from flowcorr.health.replicas import ReplicaMonitor
from flowcorr.health.rule import BrokenRule, Rule, Units
from flowcorr.health.setting import Setting, clip_key, num_terms
from flowcorr.health.table import RULES
from flowcorr.rollout.precision import usual_gap

NUM_ELEMENTS, USUAL_GAP = "rollout/num_elements", "rollout/usual_gap"
"""The metrics that are `D`, and the limit of `rollout_corr/replay/window`."""


def units_of(config: Config, logged: Mapping[str, Any]) -> Units:
    """The units in which a run of this configuration is judged.

    Args:
        config: the run's configuration.
        logged: metrics of a step, which hold facts of its model: `D`, and the gap that its precision explains; without
            them step noise is not judged, and guidance is taken to amplify rounding.
    """
    setting, num_elements = Setting.of(config), logged_num_elements(logged)
    gap = logged[USUAL_GAP] if logged.get(USUAL_GAP) is not None else usual_gap(config)
    units = units_of_setting(setting, num_elements, num_terms=num_terms(config))
    return replace(units, config=config, usual_gap=gap).with_velocities(logged)


def units_of_setting(setting: Setting, num_elements: int | None, *, num_terms: int) -> Units:
    """The units of a run of unknown precision, such as another trainer's."""
    units = Units(num_terms=num_terms, num_elements=num_elements, densities=setting.densities)
    correction = setting.correction
    if correction.mode == "off":
        return units
    cap = correction.rollout_is_threshold
    if correction.applies_weights and isinstance(cap, float):
        units = replace(units, cap=cap)
    return replace(
        units,
        bypass=correction.mode == "bypass" and correction.loss_type == "ppo_clip",
        weighted=correction.applies_weights,
        clip_range=clip_key(setting.actor),
    )


def logged_num_elements(metrics: Mapping[str, Any]) -> int | None:
    """`D` as a training step logged it."""
    size = metrics.get(NUM_ELEMENTS)
    return None if size is None else int(size)


def examine_run(
    records: Sequence[Mapping[str, Any]],
    units: Units,
    rules: Sequence[Rule] = RULES,
    *,
    places: Mapping[int, str] = MappingProxyType({}),
    by_step: Mapping[int, Units] = MappingProxyType({}),
) -> list[Finding]:
    """The broken rules of a run, each once at its worst step, the most serious first.

    Args:
        records: the metrics of its steps.
        units: the run's units.
        rules: those of its metrics.
        places: by rollout worker, where it runs, in words.
        by_step: the units of training steps that have their own.
    """
    monitor = HealthMonitor(units, rules, places=places)
    by_key: dict[tuple[str, str], list[BrokenRule]] = defaultdict(list)
    lasting: set[tuple[str, str]] = set()
    for record in filter(is_step, records):
        step = record.get("step")
        judged = monitor.judge(record, by_step.get(step, units) if step is not None else units)
        lasting.update(broken.key for broken in monitor.news(judged))
        for broken in judged:
            by_key[broken.key].append(replace(broken, finding=_with(broken.finding, step=step)))
    findings = [
        _with(max(steps, key=lambda broken: broken.badness).finding, steps_broken=len(steps))
        for key, steps in by_key.items()
        if key in lasting
    ]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


class HealthMonitor:
    """Follows a run and reports each broken rule once, and again if it becomes serious; a jump each time.

    Args:
        units: the run's units.
        rules: those of its metrics.
        earlier: the records of a resumed run.
        places: by rollout worker, where it runs, in words.
    """

    def __init__(
        self,
        units: Units,
        rules: Sequence[Rule] = RULES,
        *,
        earlier: Sequence[Mapping[str, Any]] = (),
        places: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._units, self._rules = units, rules
        self._detectors = DriftDetector(), JumpDetector(), ReplicaMonitor(places)
        for metrics in filter(is_step, earlier):
            self._detected(metrics)
        self._streaks: dict[tuple[str, str], int] = {}
        self._reported: dict[tuple[str, str], Level] = {}

    def update(
        self, metrics: Mapping[str, Any], faults: Sequence[Finding] = (), *, units: Units | None = None
    ) -> list[Finding]:
        """The new findings after this step; records of evaluations alone are skipped.

        Args:
            metrics: of the step.
            faults: what `diagnose` found in its terms, where they are at hand.
            units: of this step; None for the run's.
        """
        if not is_step(metrics):
            return []
        told = [fault for fault in faults if self._is_new((fault.cause, ""), fault.level)]
        judged = [broken for broken in self.judge(metrics, units) if matters(broken.finding, faults)]
        return [*told, *(broken.finding for broken in self.news(judged))]

    def judge(self, metrics: Mapping[str, Any], units: Units | None = None) -> list[BrokenRule]:
        """All rules that the next training step breaks, however often they were broken before."""
        of_step = (units or self._units).of_step(metrics)
        return [*broken_rules(metrics, of_step, self._rules), *self._detected(metrics)]

    def news(self, judged: Sequence[BrokenRule]) -> list[BrokenRule]:
        """Select the broken rules of a training step that have lasted long enough and are to be reported."""
        self._streaks = {broken.key: self._streaks.get(broken.key, 0) + 1 for broken in judged}
        lasting = [broken for broken in judged if self._streaks[broken.key] >= broken.rule.patience]
        return [
            broken
            for broken in lasting
            if self._is_new(broken.key, broken.finding.level) or broken.rule.each_time
        ]

    def _detected(self, metrics: Mapping[str, Any]) -> list[BrokenRule]:
        return [broken for detector in self._detectors for broken in detector.update(metrics)]

    def _is_new(self, key: tuple[str, str], level: Level) -> bool:
        """Whether a finding was not told yet, or milder; from now on it is."""
        reported = self._reported.get(key)
        if reported is not None and LEVELS.index(reported) <= LEVELS.index(level):
            return False
        self._reported[key] = level
        return True


def broken_rules(metrics: Mapping[str, Any], units: Units, rules: Sequence[Rule]) -> list[BrokenRule]:
    """The rules that a training step breaks, without those that another one hides.

    Args:
        metrics: of the step.
        units: of the step.
        rules: those that judge it.
    """
    judged = [rule.judge(metrics, units) for rule in rules]
    broken = [one for one in judged if one is not None]
    hidden = {name for one in broken for name in one.rule.hides}
    return [one for one in broken if one.rule.name not in hidden]


def matters(finding: Finding, faults: Sequence[Finding]) -> bool:
    """Whether to report a finding together with these faults: all but notes, such as noise in the clip range."""
    return not (faults and finding.level == "note")


def is_step(metrics: Mapping[str, Any]) -> bool:
    """Whether a record has metrics of a training step, not of an evaluation alone."""
    return any(not name.startswith("eval/") for name in metrics if name != "step")


def _with(finding: Finding, **numbers: Any) -> Finding:
    return replace(finding, numbers={**finding.numbers, **numbers})
