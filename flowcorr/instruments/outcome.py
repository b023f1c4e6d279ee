"""The outcome of an instrument: a `Report` of verdict, findings, facts, tables and charts.

An instrument is a function that returns a `Report`; `flowcorr.instruments.page` shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from markupsafe import Markup

from flowcorr.health.finding import Finding, Level, shown, worst
from flowcorr.instruments.web_page import framed


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number or name that was measured or is known.

    Attributes:
        name: its name in JSON.
        value: a plain value.
        text: the same as a sentence; empty where people need not read it.
    """

    name: str
    value: Any
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        name: of its values in JSON.
        heading: what people read; the name if it is empty.
        show: makes a cell of a value; None is shown as `-`.
        words: whether it holds words, which stand left; numbers stand right.
    """

    name: str
    heading: str = ""
    show: Callable[[Any], str] = shown
    words: bool = False

    def cell(self, value: Any) -> str:
        """A value as text for a person."""
        return "-" if value is None else self.show(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of plain values under columns, text columns first.

    Attributes:
        name: its name in JSON.
        title: its heading.
        columns: one for each value of a row.
        rows: the values.
        note: a remark on it.
        marks: for each row `this` where it stands for what is used now, `idle` where it tells nothing, or nothing;
            empty for no marks. A terminal counts idle rows, and a page shows them.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    marks: Sequence[Literal["this", "idle", ""]] = ()

    @property
    def header(self) -> list[str]:
        """The headings."""
        return [column.heading or column.name for column in self.columns]

    @property
    def num_words(self) -> int:
        """How many columns hold words."""
        return sum(column.words for column in self.columns)

    def cells(self, row: Sequence[Any]) -> list[str]:
        """A row as text for a person."""
        return [column.cell(value) for column, value in zip(self.columns, row, strict=True)]

    def records(self) -> list[dict[str, Any]]:
        """The rows by name of column."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def mark(self, place: int) -> str:
        """The mark of a row."""
        return self.marks[place] if self.marks else ""


class Picture(Protocol):
    """A chart or an image of a page."""

    @property
    def title(self) -> str:
        """The heading of the picture."""

    def html(self) -> Markup:
        """The picture as an element of a page, with its title and its caption."""

    def numbers(self) -> Mapping[str, Any] | None:
        """Everything that it draws, as plain values; None of an image."""

    def png(self, note: str = "") -> bytes | None:
        """The picture as a PNG file, with `note` below it; None if it has a file already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """Charts or images under a heading.

    Attributes:
        title: the heading.
        pictures: by name of their files.
        text: a remark on all of them, or the reason why there are none.
        legend: mark, name and colour of each line.
        wide: whether each needs more room.
    """

    title: str
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    text: str = ""
    legend: Sequence[tuple[str, str, str]] = ()
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The result of an instrument: verdict, findings, facts, tables and charts.

    Attributes:
        title: what was looked at.
        verdict: the outcome, without a full stop: the first line everywhere.
        facts: what was measured or is known.
        tables: in order.
        charts: in order.
        findings: what was found, in the order in which it matters.
    """

    title: str
    verdict: str
    facts: Sequence[Fact] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Charts] = ()
    findings: Sequence[Finding] = ()

    @property
    def level(self) -> Level:
        """The worst level of the findings; `healthy` without any."""
        return worst(finding.level for finding in self.findings)

    def __repr__(self) -> str:
        return f"<Report of {self.title}: {self.verdict}>"

    def _repr_html_(self) -> str:
        return framed(self)

    def causes(self, level: Level = "serious") -> list[str]:
        """The different causes of the findings of a level."""
        return list(dict.fromkeys(finding.cause for finding in self.findings if finding.level == level))

    def fact(self, name: str) -> Any:
        """The value of a fact; None if it is not known."""
        return next((fact.value for fact in self.facts if fact.name == name), None)

    def table(self, name: str) -> list[dict[str, Any]]:
        """The rows of a table by column; empty without such a table."""
        return next((table.records() for table in self.tables if table.name == name), [])

    def _charts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The numbers of each chart by its name, with its section and the runs that short names of lines stand for."""
        for section in self.charts:
            lines = {mark: name for mark, name, _ in section.legend if mark != name}
            beside: dict[str, Any] = {"section": section.title} | ({"lines": lines} if lines else {})
            for name, picture in section.pictures.items():
                if (numbers := picture.numbers()) is not None:
                    yield name, beside | dict(numbers)

    def to_mapping(self) -> dict[str, Any]:
        """Plain, finite values for JSON."""
        return _plain(
            {
                "title": self.title,
                "verdict": self.verdict,
                "level": self.level,
                "findings": [
                    {name: getattr(finding, name) for name in Finding.__dataclass_fields__}
                    for finding in self.findings
                ],
                "facts": {fact.name: fact.value for fact in self.facts},
                "tables": {table.name: table.records() for table in self.tables},
                "charts": dict(self._charts()),
            }
        )


def on_files(notes: Iterable[str]) -> list[Finding]:
    """Findings about missing parts of a run's files, and about stand-ins for them."""
    return [Finding(level="note", cause="files", sentence=note) for note in notes]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
