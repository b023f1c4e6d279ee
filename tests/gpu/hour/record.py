"""What was measured: rows by part, as JSON that can be gone on from, and as a Markdown table."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
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
    """The outcomes of all parts in a folder's `first_hour.json`; `save` writes the table too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: dict[str, Outcome] = {}
        file = folder / "first_hour.json"
        stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for name, entry in stored.items():
            self.outcomes[name] = Outcome(**{**entry, "rows": [Row(**row) for row in entry["rows"]]})

    def save(self) -> None:
        stored = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "first_hour.json").write_text(json.dumps(stored, indent=1), encoding="utf-8")
        (self.folder / "first_hour.md").write_text(self.table(), encoding="utf-8")

    def table(self) -> str:
        lines = ["| part | measured | value | expected | | |", "|---|---|---|---|---|---|"]
        for name, outcome in self.outcomes.items():
            state = {"done": "", "failed": "FAILED", "skipped": "skipped"}[outcome.status]
            lines.append(
                f"| **{name}** | {outcome.seconds:.0f} s | | | {state} | {_one_line(outcome.reason)} |"
            )
            for row in outcome.rows:
                value = f"{_number(row.value)} {row.unit}".strip()
                lines.append(
                    f"| | {_one_line(row.what)} | {value} | {_expected(row)} | {row.verdict} | {_one_line(row.note)} |"
                )
        return "\n".join(lines) + "\n"


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
