"""Watches another trainer's run while it trains: `rollout_corr/*` for its own logger, and each finding once.

The metrics and the findings are those that `flowcorr report` makes of a dump of the steps so far. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from torch import Tensor

from flowcorr import dumps
from flowcorr.errors import BatchError
from flowcorr.health.finding import Finding
from flowcorr.health.rules import HealthMonitor, units_of_setting
from flowcorr.instruments.faults import diagnose
from flowcorr.instruments.step_files import holds_trainer, scored_columns, scored_in
from flowcorr.instruments.steps import ages_of, gap_of, setting_of, step_metrics

PREFIX = "rollout_corr/"
_NEEDED = {"clip_ratio": "clip_noise", "num_elements": "shared_shift"}
"""Optional fields, and the rule that cannot judge without each, or only half."""


class Watch:
    """Watches one run: call it once a training step, on one rank, with the samples of all ranks.

    It remembers for how many steps a rule has been broken and what it has reported, so each finding comes once, and
    again if it becomes serious.
    """

    def __init__(self) -> None:
        self._monitor: HealthMonitor | None = None
        self._num_elements: int | None = None
        self._columns: list[Tensor] = []  # steps of the window that the trainer scored, once each

    def __call__(
        self, step: int, **fields: Unpack[dumps.StepFields]
    ) -> tuple[dict[str, float], list[Finding]]:
        """The metrics and the new findings of a training step.

        Args:
            step: the training step.
            fields: of the step, as `flowcorr.dump` takes them. Without `step_indices`, steps are counted within the
                window.

        Returns:
            `rollout_corr/*` of the terms that were scored before the step's first update, where `before_update` tells
            them, and the findings that are new; `Finding.fault` of one that only a fault explains, at which flowcorr's
            own trainer stops. Those of the first step name rules that cannot judge for lack of a field.

        Raises:
            BatchError: a shape or value is not allowed, or the trainer's own log-probs are missing.
        """
        dumped, loss = dumps.described(step, **fields)
        if not holds_trainer(dumped):
            raise BatchError(
                "flowcorr.watch got the rollout's log-probs alone; give the trainer's as well: old_log_probs where it "
                "recomputes them, or current_log_probs"
            )
        self._num_elements = dumped.num_elements or self._num_elements
        dumped = replace(dumped, num_elements=self._num_elements)
        setting, count = setting_of(dumped, loss), dumped.rollout_log_probs.numel()
        units = units_of_setting(setting, dumped.num_elements, num_terms=count)
        scored = self._scored(dumped)
        metrics = step_metrics(dumped, setting, scored=scored)
        unjudged: list[Finding] = []
        if self._monitor is None:
            unjudged, self._monitor = _unjudged(dumps.missing(dumped, loss)), HealthMonitor(units)
        faults = diagnose({step: gap_of(dumped, scored=scored)}, ages_of({step: dumped}))
        findings = [*self._monitor.update(metrics, faults, units=units), *unjudged]
        findings = [replace(finding, numbers={"step": step, **finding.numbers}) for finding in findings]
        return {name: value for name, value in metrics.items() if name.startswith(PREFIX)}, findings

    def _scored(self, dumped: dumps.DumpedTerms) -> Tensor | None:
        new = scored_columns(dumped)
        self._columns = [known for known in self._columns if known.shape == new.shape and known.ne(new).any()]
        self._columns.append(new)
        return scored_in(self._columns)


def _unjudged(absent: Sequence[str]) -> list[Finding]:
    missing = [name for name in _NEEDED if name in absent]
    if not missing:
        return []
    return [
        Finding(
            level="note",
            cause="files",
            sentence="some rules cannot judge this run, or only half, for lack of fields",
            numbers={"rules": [_NEEDED[name] for name in missing], "missing": missing},
            remedy="give them to flowcorr.watch",
        )
    ]


watch = Watch()
"""Watches the one run of this process; for several, make a `Watch` of each."""
