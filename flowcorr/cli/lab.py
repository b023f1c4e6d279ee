"""A lab report on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flowcorr.cli.audit import saved
from flowcorr.diagnostics.lab import LabReport, page
from flowcorr.instruments.terminal import console_of, show_table


def show_lab(report: LabReport, files: Sequence[Path], console: Console | None = None) -> None:
    """Print a row for each preset that changes the gradient's direction, what the others do, and where it was saved."""
    console = console_of(console)
    console.print(page.facts(report), markup=False)
    shown = [
        (page.row(replay, outcome), "bold" if replay.of_run else None)
        for replay in report.replays
        if (outcome := replay.outcome) is not None and (replay.of_run or not outcome.same)
    ]
    show_table(console, page.HEADER, [row for row, _ in shown], styles=[style for _, style in shown])
    for reason, names in page.reasons(report).items():
        console.print(f"not replayed: {', '.join(names)} ({reason})", markup=False)
    for note in report.notes:
        console.print(note, markup=False)
    console.print(f"\n{report.reading}", markup=False)
    console.print(f"saved: {saved(files)}", markup=False, soft_wrap=True)
