"""A metric: everything that pages, charts, health rules and the terminal say of it stands in its row."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from flowcorr.health.rule import Rule
from flowcorr.questions.question import Question

if TYPE_CHECKING:
    from flowcorr.metrics import Stat
    from flowcorr.records import Terms

_RANGE = ("low", "high", "serious", "patience")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A metric's chart in the report.

    Attributes:
        section: the charts that it stands among, in the order of the rows.
        title: its title.
        remark: the unit of the values in the words below it; None for the metric's unit.
    """

    section: Literal["drift", "replay", "correction", "update"]
    title: str
    remark: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: the logged name, with placeholders in angle brackets: `<i>` is a step index or a worker, `<mode>` a
            rejection mode, and `<name>` a name from the configuration.
        meaning: its explanation. Of a metric that every run logs, this and all below that is left out is that of its
            own row.
        unit: unit of the value; empty for a plain number.
        rule: its healthy range, with advice; None if nothing judges it.
        chart: its chart in the report; None for none of its own.
        label: its name after each step of `flowcorr train`; empty if it is not shown there.
        measure: of a metric of one's own that no loss or reward logs: its value, from the terms of which the gap is
            measured. They come in parts, whose stats are merged; a gradient is not needed.
    """

    name: str
    meaning: str = ""
    unit: str = ""
    rule: Rule | None = None
    chart: Drawn | None = None
    label: str = ""
    measure: Callable[[Terms], Stat] | None = None

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric with its placeholders filled in."""
        pattern = re.sub(r"<\w+>", "[^ ]+", re.sub(r"([{}().*+])", r"\\\1", self.name))
        return re.fullmatch(pattern, name) is not None


def row(name: str, meaning: str, unit: str = "", **facts: Any) -> Metric:
    """A metric by its name below the prefix of its table, see `under`."""
    return Metric(name=name, meaning=meaning, unit=unit, **facts)


def asked(question: Question, **facts: Any) -> Metric:
    """The metric of a question, with its rule."""
    rule = Rule.of(question)
    metric = row(
        question.logged_as, question.meaning or f"{question.what}.", question.unit, rule=rule, **facts
    )
    return named(metric, metric.name)


def under(prefix: str, *metrics: Metric) -> tuple[Metric, ...]:
    """Rows with `prefix` before their names, but where it is there already."""
    return tuple(named(metric, prefix + metric.name.removeprefix(prefix)) for metric in metrics)


def over(base: Metric, own: Metric) -> Metric:
    """Lay a user's row over the row `base` of the same metric, which fills the fields left out.

    The range of its rule is its own, and all of it.
    """
    left_out = {
        field.name: getattr(base, field.name)
        for field in fields(Metric)
        if field.name != "rule" and getattr(own, field.name) == field.default
    }
    if own.rule is None or base.rule is None:
        return replace(own, **left_out, rule=own.rule or base.rule)
    words = {
        field.name: getattr(base.rule, field.name)
        for field in fields(Rule)
        if field.name not in _RANGE and getattr(own.rule, field.name) == field.default
    }
    return replace(own, **left_out, rule=replace(own.rule, **words))


def named(metric: Metric, name: str) -> Metric:
    """A row under another name, which is that of its rule's metric as well."""
    rule = None if metric.rule is None else replace(metric.rule, metric=name)
    return replace(metric, name=name, rule=rule)
