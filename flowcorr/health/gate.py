"""Stops a training run at a value that only a fault explains.

Everything that a training step measures of its rollout is judged before its update, so that nothing is learned from a
broken engine. What an update measures itself, and the residuals of the whole run, are judged after it: the state from
before the training step is the one that is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from flowcorr.config.schema import Config
from flowcorr.dumps import DumpedTerms
from flowcorr.errors import RolloutFault
from flowcorr.health.finding import Finding
from flowcorr.health.metric import Metric
from flowcorr.health.rule import BrokenRule
from flowcorr.health.rules import broken_rules, units_of
from flowcorr.health.table import rules_of
from flowcorr.metrics import Metrics
from flowcorr.questions.question import EQUALITY

FaultsByWorker = Callable[[RolloutFault], Mapping[int, Sequence[Finding]]]


class Gate:
    """Judges the training steps of a run by all rules whose row states a `fault`.

    Args:
        config: the run's; with `trainer.on_fault: warn`, every step passes.
        rows: of all its metrics, see `rows_of`.
    """

    def __init__(self, config: Config, rows: Sequence[Metric]) -> None:
        stops = config.trainer.on_fault == "stop"
        self._config, self._rules = config, rules_of(rows) if stops else ()
        self._streaks: Counter[str] = Counter()

    def check(
        self,
        step: int,
        metrics: Metrics,
        evidence: Callable[[], DumpedTerms | None],
        by_worker: FaultsByWorker | None = None,
    ) -> None:
        """Judge metrics of a training step, merged over all ranks, so that all of them decide alike.

        Args:
            step: the training step.
            metrics: all that is known so far. Of a rule with patience, each call that has the metric counts.
            evidence: makes the terms that an error carries.
            by_worker: see `RolloutFault`.

        Raises:
            RolloutFault: a value is beyond what its rule calls a fault.
        """
        if not self._rules:
            return
        values = metrics.compute()
        broken = self._broken(values)
        names = {one.rule.name for one in broken}
        for rule in self._rules:
            if rule.metric in values:
                self._streaks[rule.name] = self._streaks[rule.name] + 1 if rule.name in names else 0
        findings = _faults([one for one in broken if self._streaks[one.rule.name] >= one.rule.patience])
        if findings:
            raise RolloutFault(
                f"training step {step} was stopped, for what it measured proves a fault: "
                f"{'; '.join(map(str, findings))}; trainer.on_fault=warn trains on all the same",
                step=step,
                findings=findings,
                metrics=values,
                terms=evidence(),
                by_worker=by_worker,
            )

    def faults(self, values: Mapping[str, float]) -> list[Finding]:
        """Faults that metrics prove by themselves, without the training steps before; the part at fault comes first."""
        return _faults(self._broken(values))

    def _broken(self, values: Mapping[str, float]) -> list[BrokenRule]:
        return broken_rules(values, units_of(self._config, values).of_step(values), self._rules)


def _faults(broken: Sequence[BrokenRule]) -> list[Finding]:
    faults = [one for one in broken if one.finding.fault]
    # What breaks an equality names the part; gaps of both stacks may follow from it.
    faults.sort(key=lambda one: one.rule.fault != EQUALITY)
    return [replace(one.finding, level="serious") for one in faults]
