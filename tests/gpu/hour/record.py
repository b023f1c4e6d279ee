"""What was measured: rows by part, as lines of JSON that can be gone on from, and as Markdown tables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

Status = Literal["done", "failed", "skipped"]
Value = float | str | list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number.

    Attributes:
        what: was measured.
        value: a number, one for each step of a schedule, or a word.
        unit: of the value.
        expected: the number that it is compared with.
        within: largest relative distance from it; None compares without a verdict.
        at_most: the largest value that is in order.
        failed: whether there is no value because something went wrong; `note` says what.
        note: whatever else a reader needs.
    """

    what: str
    value: Value
    unit: str = ""
    expected: float | None = None
    within: float | None = None
    at_most: float | None = None
    failed: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        """`ok`, `look`, `FAILED`, or nothing where nothing was promised."""
        if self.failed:
            return "FAILED"
        checks = []
        if isinstance(self.value, int | float):
            if self.expected is not None and self.within is not None:
                checks.append(abs(self.value - self.expected) <= self.within * abs(self.expected))
            if self.at_most is not None:
                checks.append(self.value <= self.at_most)
        return "" if not checks else "ok" if all(checks) else "look"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one part.

    Attributes:
        status: how it ended.
        seconds: that it took.
        reason: of a part that failed or was skipped.
        rows: what it measured before it ended.
        facts: what later parts need.
    """

    status: Status = "failed"
    seconds: float = 0.0
    reason: str = ""
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Record:
    """The outcomes of all parts in a folder's `first_hour.jsonl`; `save` writes the tables too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / "first_hour.jsonl"
        self.outcomes = read_outcomes(file) if file.is_file() else {}

    def save(self) -> None:
        lines: list[dict[str, Any]] = []
        for name, outcome in self.outcomes.items():
            part = asdict(outcome)
            del part["rows"]
            lines.append({"part": name, **part})
            lines += [{"part": name, **_given(row)} for row in outcome.rows]
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        (self.folder / "first_hour.jsonl").write_text(text, encoding="utf-8")
        (self.folder / "first_hour.md").write_text(tables(self.outcomes), encoding="utf-8")


def read_outcomes(file: Path) -> dict[str, Outcome]:
    """The outcome of each part in a file that `Record.save` wrote: a line a part, then a line for each of its rows."""
    outcomes: dict[str, Outcome] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        name = entry.pop("part")
        if "what" in entry:
            outcomes[name].rows.append(Row(**entry))
        else:
            outcomes[name] = Outcome(**entry)
    return outcomes


def tables(outcomes: Mapping[str, Outcome]) -> str:
    """Markdown: how many rows lie outside their range, how each part ended, and all rows, folded."""
    rows = [(name, row) for name, outcome in outcomes.items() for row in outcome.rows]
    verdicts = [row.verdict for _, row in rows if row.verdict]
    lines = [
        f"{len(rows)} rows, {len(verdicts)} of them with a range, {verdicts.count('look')} outside it (`look`).",
        "",
        "| part | time | | |",
        "|---|---|---|---|",
    ]
    for name, outcome in outcomes.items():
        state = {"done": "", "failed": "FAILED", "skipped": "skipped"}[outcome.status]
        lines.append(f"| {name} | {outcome.seconds:.0f} s | {state} | {_one_line(outcome.reason)} |")
    lines += ["", "<details><summary>all rows</summary>", ""]
    lines += ["| part | measured | value | expected | | |", "|---|---|---|---|---|---|"]
    for name, row in rows:
        value = f"{_number(row.value)} {row.unit}".strip()
        note = _one_line(row.note)
        lines.append(
            f"| {name} | {_one_line(row.what)} | {value} | {_expected(row)} | {row.verdict} | {note} |"
        )
    return "\n".join([*lines, "", "</details>", ""])


def _given(row: Row) -> dict[str, Any]:
    """The keys of a row that differ from their defaults."""
    values = {item.name: (getattr(row, item.name), item.default) for item in fields(row)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _expected(row: Row) -> str:
    if row.expected is not None:
        return _number(row.expected) + ("" if row.within is None else f" ± {row.within:.0%}")
    return "" if row.at_most is None else f"at most {_number(row.at_most)}"


def _number(value: Value) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " ".join(map(_number, value))
    return f"{value:.3g}" if math.isfinite(value) and abs(value) < 1e4 else f"{value:.2e}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")
