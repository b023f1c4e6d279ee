"""Applies the rules of metrics to a step, to a finished run, or to a run during training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from flowcorr.config.schema import Config
from flowcorr.instruments import image_drift, jumps, replicas
from flowcorr.instruments.clip_noise import clip_key
from flowcorr.instruments.finding import LEVELS, Finding, Level
from flowcorr.instruments.gap_size import num_terms
from flowcorr.instruments.jumps import JumpDetector
from flowcorr.instruments.limits import Units, limits_of, mean_gap_of
from flowcorr.instruments.metrics.metric import NATS, Rule
from flowcorr.instruments.metrics.table import rows_of
from flowcorr.instruments.replicas import ReplicaMonitor
from flowcorr.instruments.setting import Setting
from flowcorr.rollout.precision import image_limit_of, usual_gap
from flowcorr.rollout.step_distance import step_distance
from flowcorr.trainer.residuals import RESIDUALS

NUM_ELEMENTS, USUAL_GAP = "rollout/num_elements", "rollout/usual_gap"
"""The metrics that are `D`, and the limit of `rollout_corr/replay/window`."""
_LIKE_WINDOW = ("replay_before", "replay_between", "replay_after")
_OF_WEIGHTS = ("mean_weight", "weight_std", "effective_sample_size", "cap")


def units_of(config: Config, logged: Mapping[str, Any]) -> Units:
    """The units in which a run of this configuration is judged.

    Args:
        config: the run's configuration.
        logged: metrics of a step, which hold facts of its model: `D`, and the gap that its precision explains; without
            them step noise is not judged, and guidance is taken to amplify rounding.
    """
    setting, num_elements = Setting.of(config), logged_num_elements(logged)
    gap = logged[USUAL_GAP] if logged.get(USUAL_GAP) is not None else usual_gap(config)
    units = replace(
        units_of_setting(setting, num_elements, num_terms=num_terms(config)),
        usual_gap=gap,
        rows=rows_of(config),
        rounding={
            "replay_decode": image_limit_of(config),
            **{residual.name: residual.limit(config, gap) for residual in RESIDUALS},
        },
    )
    if num_elements is None or setting.staleness:
        return units
    return replace(units, usual_distance=step_distance(config.sampling, gap))


def units_of_setting(setting: Setting, num_elements: int | None, *, num_terms: int) -> Units:
    """The units of a run whose precision is not known, such as another trainer's."""
    every_run: dict[str, Any] = {
        "num_terms": num_terms,
        "num_elements": num_elements,
        "densities": setting.densities,
    }
    correction = setting.correction
    if correction.mode == "off":
        return Units(**every_run)
    cap = correction.rollout_is_threshold
    return Units(
        cap=cap if correction.applies_weights and isinstance(cap, float) else None,
        bypass=correction.mode == "bypass" and correction.loss_type == "ppo_clip",
        weighted=correction.applies_weights,
        clip_range=clip_key(setting.actor),
        **every_run,
    )


def logged_num_elements(metrics: Mapping[str, Any]) -> int | None:
    """`D` as a training step logged it."""
    size = metrics.get(NUM_ELEMENTS)
    return None if size is None else int(size)


def examine_step(
    metrics: Mapping[str, Any], units: Units, *, start: Mapping[str, Any] | None = None
) -> list[Finding]:
    """The findings of one step, without waiting for the rules' patience.

    Args:
        metrics: the metrics of the step; missing ones and nulls are not judged.
        units: the run's units.
        start: the metrics of the run's first step; without them image drift is not judged.
    """
    findings = [_examine(rule, metrics, units) for rule in units.rules]
    broken = {finding.cause for finding in findings if finding is not None}
    if "replay_window" in broken:  # the other legs have the same fault in them
        findings = [finding for finding in findings if finding is None or finding.cause not in _LIKE_WINDOW]
    if start is not None:
        findings.append(_examine_images(metrics, start))
    return [finding for finding in findings if finding is not None]


def examine_run(
    records: Sequence[Mapping[str, Any]],
    units: Units,
    places: Mapping[int, str] = MappingProxyType({}),
    by_step: Mapping[int, Units] = MappingProxyType({}),
) -> list[Finding]:
    """The broken rules of a run, each once at its worst step, the most serious first.

    Args:
        records: the metrics of its steps.
        units: the run's units.
        places: by rollout worker, where it runs, in words.
        by_step: the units of training steps that have their own.
    """
    monitor = HealthMonitor(units, places=places)
    workers: list[Finding] = []
    broken: dict[str, list[Finding]] = {}
    lasting: set[str] = set()
    start = next(filter(is_step, records), None)
    for record in records:
        of_step = by_step.get(record["step"], units) if by_step else units
        for finding in monitor.update(record, units=of_step):
            lasting.add(finding.cause)
            if finding.cause == jumps.RULE.name:
                broken.setdefault(finding.cause, []).append(_at(finding, record))
            elif finding.cause == replicas.RULE.name:
                workers.append(_at(finding, record))
        for finding in examine_step(record, of_step, start=start):
            broken.setdefault(finding.cause, []).append(_at(finding, record))
    findings = [
        _with(min(hits, key=lambda hit: (_rank(hit.level), -_distance(hit))), steps=len(hits))
        for rule, hits in broken.items()
        if rule in lasting
    ]
    findings += workers
    return sorted(findings, key=lambda finding: _rank(finding.level))


class HealthMonitor:
    """Follows a run and reports each broken rule once, and again if it becomes serious; a jump each time.

    Args:
        units: the run's units.
        earlier: the records of a resumed run.
        places: by rollout worker, where it runs, in words.
    """

    def __init__(
        self,
        units: Units,
        earlier: Sequence[Mapping[str, Any]] = (),
        places: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        steps = list(filter(is_step, earlier))
        self._units, self._start = units, steps[0] if steps else None
        self._jumps, self._replicas = JumpDetector(), ReplicaMonitor(places)
        for metrics in steps:
            self._jumps.update(metrics)
            self._replicas.update(metrics)
        self._patience = {rule.name: rule.patience for rule in (*units.rules, image_drift.RULE)}
        self._streaks: dict[str, int] = {}
        self._reported: dict[str, int] = {}

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
        told = [fault for fault in faults if fault.cause not in self._reported]
        self._reported.update({fault.cause: _rank(fault.level) for fault in told})
        self._start = metrics if self._start is None else self._start
        found = beside(faults, examine_step(metrics, units or self._units, start=self._start))
        self._streaks = {finding.cause: self._streaks.get(finding.cause, 0) + 1 for finding in found}
        lasting = [
            finding for finding in found if self._streaks[finding.cause] >= self._patience[finding.cause]
        ]
        new = [
            finding
            for finding in lasting
            if _rank(finding.level) < self._reported.get(finding.cause, len(LEVELS))
        ]
        self._reported.update({finding.cause: _rank(finding.level) for finding in new})
        jump = self._jumps.update(metrics)
        odd = [one for one in self._replicas.update(metrics) if one.numbers["metric"] not in self._reported]
        self._reported.update({one.numbers["metric"]: _rank(one.level) for one in odd})
        return [*told, *new, *([] if jump is None else [jump]), *odd]


def beside(faults: Sequence[Finding], findings: Sequence[Finding]) -> list[Finding]:
    """The findings that matter beside these faults: all but notes, such as that noise fills the clip range."""
    return [finding for finding in findings if not (faults and finding.level == "note")]


def _rank(level: Level) -> int:
    return LEVELS.index(level)


def is_step(metrics: Mapping[str, Any]) -> bool:
    """Whether a record has metrics of a training step, not of an evaluation alone."""
    return any(not name.startswith("eval/") for name in metrics if name != "step")


def _examine(rule: Rule, metrics: Mapping[str, Any], units: Units) -> Finding | None:
    metric = _logged_name(rule, metrics)
    value = metrics.get(metric)
    if value is None:
        return None
    low, high = limits_of(rule, units, mean_gap_of(metrics, units))
    if low <= value <= high:
        return None
    threshold = low if value < low else high
    if value > rule.serious:
        threshold = rule.serious
    return Finding(
        cause=rule.name,
        level=_level(rule, value, units),
        sentence=f"{rule.what} is {'below' if value < low else 'above'} its limit",
        numbers=_judged(metric, value, threshold) | _noise(rule, metrics, units),
        remedy=_advice(rule, units, value),
    )


def _examine_images(metrics: Mapping[str, Any], start: Mapping[str, Any]) -> Finding | None:
    """Whether the reward rises while the images drift far from their start."""
    drift = image_drift.largest_drift(metrics, start)
    before, now = start.get("reward/mean"), metrics.get("reward/mean")
    rule = image_drift.RULE
    if drift is None or drift.size <= rule.high or before is None or now is None or now <= before:
        return None
    return Finding(
        cause=rule.name,
        level="warning",
        sentence=f"the reward rose while the image statistic {drift.statistic} changed by more than its limit",
        numbers=_judged(drift.metric, drift.size, rule.high)
        | {"at the start": drift.start, "now": drift.now, "reward then": before, "reward now": now},
        remedy=rule.advice,
    )


def _logged_name(rule: Rule, metrics: Mapping[str, Any]) -> str:
    applied = f"actor/{rule.metric}"
    return applied if rule.applied and applied in metrics else rule.metric


def _level(rule: Rule, value: float, units: Units) -> Level:
    if (rule.name == "clip_noise" and not units.bypass) or _only_shown(rule, units):
        return "note"
    return "serious" if value > rule.serious else "warning"


def _advice(rule: Rule, units: Units, value: float) -> str:
    if rule.name == "replay_decode" and value == math.inf:
        return (
            "the trainer's own decoder gives pixels that are not finite: check the files of its VAE, and where "
            "model.dtype is not float32, try that"
        )
    if rule.name == "clip_noise" and not units.bypass:
        return (
            "where old log-probs are recomputed, ratios start at 1, and reinforce does not clip; in bypass mode with "
            "ppo_clip, this gap decides which terms are clipped"
        )
    if _only_shown(rule, units):
        return (
            "these weights are only logged, as a measure of the gap; `flowcorr audit` recommends what to do"
        )
    return rule.advice


def _only_shown(rule: Rule, units: Units) -> bool:
    """Whether the rule is about weights that are only logged."""
    return rule.name in _OF_WEIGHTS and not units.weighted


def _noise(rule: Rule, metrics: Mapping[str, Any], units: Units) -> dict[str, Any]:
    if rule.name != "clip_noise":
        return {}
    return {
        "clip range": units.clip_range,
        f"mean |delta log p| ({NATS})": metrics.get("rollout_corr/logprob_abs_diff_mean"),
    }


def _judged(metric: str, value: float, limit: float) -> dict[str, Any]:
    return {"metric": metric, "value": value, "limit": limit}


def _with(finding: Finding, **numbers: Any) -> Finding:
    return replace(finding, numbers={**finding.numbers, **numbers})


def _at(finding: Finding, record: Mapping[str, Any]) -> Finding:
    return _with(finding, step=record.get("step"))


def _distance(finding: Finding) -> float:
    return abs(finding.numbers["value"] - finding.numbers["limit"])
