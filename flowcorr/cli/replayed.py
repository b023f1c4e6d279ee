"""A report on replayed samples on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from flowcorr.cli.doctor import STYLES
from flowcorr.instruments.doctor.replayed.verdicts import ReplayReport, Verdict
from flowcorr.instruments.terminal import Cell, console_of, show_table


def show_replay(report: ReplayReport, console: Console | None = None) -> None:
    """Print the verdict on each part, its evidence by sample, and the causes."""
    console = console_of(console)
    steps = ", ".join(map(str, report.steps))
    console.print(f"samples of training step {steps}, replayed with {report.model}", markup=False)
    columns = ("", "part", "step", "limits by sample", "what was found")
    show_table(console, columns, map(_row, report.verdicts), words=2, prose=True)
    for note in report.notes:
        console.print(note, style="dim", markup=False)
    console.print(verdict(report), markup=False)


def verdict(report: ReplayReport) -> str:
    """The outcome in a line."""
    named = list(dict.fromkeys(report.causes))
    if named:
        return f"at fault: {', '.join(named)}"
    unclear = [one.part for one in report.verdicts if one.status == "WARN"]
    if unclear:
        return f"{' and '.join(unclear)} differ from the replay, and the cause cannot be told"
    judged = [one.part for one in report.verdicts if one.status == "PASS"]
    return (
        f"no fault found in {', '.join(judged)}" if judged else "nothing can be told from what was captured"
    )


def _row(found: Verdict) -> tuple[Cell, ...]:
    limits = "" if found.samples is None else " ".join(f"{value:.2g}" for value in found.samples)
    return Text(found.status, STYLES[found.status]), found.part, str(found.step), limits, _message(found)


def _message(found: Verdict) -> Text:
    cause = f"{found.cause} ({found.confidence}): " if found.cause else ""
    text = Text(f"{cause}{found.message}", "dim" if found.status == "SKIP" else "")
    if found.evidence:
        text.append(f"\n{found.evidence}")
    if found.remedy and found.status != "PASS":
        text.append(f"\n-> {found.remedy}", "bold")
    return text
