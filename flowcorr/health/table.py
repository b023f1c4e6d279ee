"""Every metric that a run logs, one row for each."""

from __future__ import annotations

from collections.abc import Sequence

from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError
from flowcorr.health.metric import Metric, asked, named, over
from flowcorr.health.of_correction import REJECTION, WEIGHTS
from flowcorr.health.of_gap import DRIFT, STEPS, WORKERS
from flowcorr.health.of_run import RUN, UPDATE
from flowcorr.health.rule import Rule
from flowcorr.imports import import_target
from flowcorr.questions.question import own_questions

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


def rules_of(rows: Sequence[Metric]) -> tuple[Rule, ...]:
    """The rules of some rows, in their order."""
    return tuple(metric.rule for metric in rows if metric.rule is not None)


RULES = rules_of(METRICS)


def rule_of(metric: str, rows: Sequence[Metric]) -> Rule | None:
    """The rule that judges a metric, if any; one of the whole update has that of the same metric before it."""
    names = (metric, metric.removeprefix("actor/"))
    matches = [next((row for row in rows if row.name == name), None) for name in names]
    return next((row.rule for row in matches if row is not None), None)


def rows_of(config: Config) -> tuple[Metric, ...]:
    """The rows of a run: every run's rows, and its own ones; an own row of a shared metric is laid over the shared row.

    Raises:
        ConfigError: `trainer.metrics` names something else, or a row lacks its meaning or the words of its rule; or see
            `own_questions`.
    """
    rows = {metric.name: metric for metric in METRICS}
    for path in config.trainer.metrics:
        own = own_row("trainer.metrics", path)
        rows[own.name] = own
    for question in own_questions(config):
        if question.logged_as in rows:
            raise ConfigError(
                f"trainer.checks: {question.logged_as!r} is logged already; give the question {question.name!r} "
                "another name or metric"
            )
        rows[question.logged_as] = asked(question)
    return tuple(rows.values())


def own_row(key: str, path: str) -> Metric:
    """The row at `package.module:name`, laid over that of a metric that every run logs.

    Args:
        key: that named it, for messages.
        path: where it is.

    Raises:
        ConfigError: see `rows_of`.
    """
    row = import_target(key, path, "a row of metrics")
    if not isinstance(row, Metric):
        raise ConfigError(f"{key}={path!r} is of type {type(row).__name__}; name a flowcorr.health.Metric")
    base = find_metric(row.name)
    if row.measure is not None and base is not None:
        raise ConfigError(
            f"{key}={path!r}: every run logs {row.name!r} itself; give your metric another name, or leave "
            "its measure out to judge that metric by a rule of your own"
        )
    row = row if base is None else over(base, row)
    words = {"meaning": row.meaning}
    if row.rule is not None:
        words |= {f"rule.{name}": getattr(row.rule, name) for name in ("name", "what", "advice")}
    if empty := [name for name, value in words.items() if not value]:
        raise ConfigError(
            f"{key}={path!r}: {row.name!r} has no {', '.join(empty)}; only those of a row of every run may be "
            "left out"
        )
    return named(row, row.name)


def progress_labels(rows: Sequence[Metric]) -> dict[str, str]:
    """The metrics that `flowcorr train` shows after each step, and their labels there, the reward first."""
    return {metric.name: metric.label for metric in (*RUN, *rows) if metric.label}


def find_metric(name: str) -> Metric | None:
    """The row of a logged metric: the exact name first, then the longest name with placeholders; None without one."""
    exact = [metric for metric in METRICS if metric.name == name]
    matching = exact or [metric for metric in METRICS if metric.matches(name)]
    return max(matching, key=lambda metric: len(metric.name), default=None)
