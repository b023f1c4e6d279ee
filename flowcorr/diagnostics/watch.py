"""Watches another trainer's run while it trains: `rollout_corr/*` for its own logger, and each finding once.

The metrics and the findings are those that `flowcorr report` makes of a dump of the steps so far. Nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowcorr import dumps
from flowcorr.diagnostics.diagnosis import Cause, diagnose
from flowcorr.diagnostics.dumped import config_of, step_metrics, terms_of_step
from flowcorr.diagnostics.dumped_files import scored_columns, scored_in
from flowcorr.diagnostics.health import HealthMonitor, Level, units_of
from flowcorr.errors import BatchError

PREFIX = "rollout_corr/"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFinding:
    """What is wrong since a step; `str` makes a line for a log of it.

    Attributes:
        level: how severe it is.
        rule: the name of the health rule, or of the cause.
        step: the training step that told it.
        message: a sentence without its full stop.
        advice: what to do, another sentence.
    """

    level: Level
    rule: str
    step: int
    message: str
    advice: str

    def __str__(self) -> str:
        return f"{self.level} at step {self.step}: {self.message}; {self.advice}"


class Watch:
    """Watches one run: call it once a training step, on one rank, with the samples of all ranks.

    It remembers for how many steps a rule has been broken and what it has reported, so each finding comes once, and
    again if it becomes serious.
    """

    def __init__(self) -> None:
        self._monitor: HealthMonitor | None = None
        self._told: set[Cause] = set()
        self._columns: list[Tensor] = []  # steps of the window that the trainer scored, once each

    def __call__(self, step: int, **terms: Any) -> tuple[dict[str, float], list[WatchFinding]]:
        """The metrics and the new findings of a training step.

        Args:
            step: the training step.
            terms: what `flowcorr.dump` takes, under its names. Without `step_indices`, steps are counted within the
                window.

        Returns:
            `rollout_corr/*` of the terms that were scored before the step's first update, where `before_update` tells
            them, and the findings that are new.

        Raises:
            BatchError: a shape or value is not allowed, or the trainer's own log-probs are missing.
        """
        dumped, loss = dumps.described(step, **terms)
        if dumped.bypass and dumped.current_log_probs is None:
            raise BatchError(
                "flowcorr.watch got the rollout's log-probs alone; give the trainer's as well: old_log_probs where it "
                "recomputes them, or current_log_probs"
            )
        config = config_of(dumped, loss)
        scored = self._scored(dumped)
        metrics = step_metrics(dumped, config, scored=scored)
        if self._monitor is None:
            self._monitor = HealthMonitor(units_of(config, dumped.num_elements, precision_known=False))
        told = diagnose([terms_of_step(step, dumped, scored=scored)])
        diagnoses = [found for found in told if found.cause not in self._told]
        self._told.update(found.cause for found in diagnoses)
        findings = [
            WatchFinding(
                level=found.level,
                rule=found.cause,
                step=step,
                message=f"{found.verdict} ({found.evidence})",
                advice=found.remedy,
            )
            for found in diagnoses
        ]
        findings += [
            WatchFinding(
                level=found.level, rule=found.rule, step=step, message=found.message, advice=found.advice
            )
            for found in self._monitor.update(metrics)
            if not (told and found.level == "note")  # noise is no news beside a fault
        ]
        return {name: value for name, value in metrics.items() if name.startswith(PREFIX)}, findings

    def _scored(self, dumped: dumps.DumpedTerms) -> Tensor | None:
        new = scored_columns(dumped)
        self._columns = [known for known in self._columns if known.shape == new.shape and known.ne(new).any()]
        self._columns.append(new)
        return scored_in(self._columns)


watch = Watch()
"""Watches the one run of this process; for several, make a `Watch` of each."""
