"""Every metric that a run logs, one row for each."""

from __future__ import annotations

from flowcorr.instruments.metrics.metric import Metric, Rule
from flowcorr.instruments.metrics.of_correction import REJECTION, WEIGHTS
from flowcorr.instruments.metrics.of_gap import DRIFT, STEPS, WORKERS
from flowcorr.instruments.metrics.of_run import RUN, UPDATE

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Drift": DRIFT,
    "Importance weights": WEIGHTS,
    "Rejection": REJECTION,
    "By step": STEPS,
    "By rollout worker": WORKERS,
    "Update": UPDATE,
    "Run": RUN,
}
METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)
RULES: tuple[Rule, ...] = tuple(metric.rule for metric in METRICS if metric.rule is not None)
PROGRESS_LABELS = {metric.name: metric.label for metric in (*RUN, *METRICS) if metric.label}
"""The metrics that `flowcorr train` shows after each step, and their labels there, the reward first."""


def find_metric(name: str) -> Metric | None:
    """The row of a logged metric: the exact name first, then a name with placeholders; None if there is none."""
    exact = [metric for metric in METRICS if metric.name == name]
    return next(iter(exact or [metric for metric in METRICS if metric.matches(name)]), None)
