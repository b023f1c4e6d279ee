"""A lab report on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowcorr.cli.audit import saved
from flowcorr.diagnostics.lab import LabReport, page

_WIDTH = 140  # where there is no terminal to ask


def show_lab(report: LabReport, files: Sequence[Path], console: Console | None = None) -> None:
    """Print a row a preset, why some have none, what the rows say, and where it was saved."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH, highlight=False)
    console.print(page.facts(report), markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for place, column in enumerate(page.HEADER):
        first = place == 0
        table.add_column(column, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    for replay in report.replays:
        if replay.outcome is not None:
            style = "bold" if replay.of_run else "dim" if replay.outcome.same else None
            table.add_row(*page.row(replay, replay.outcome), style=style)
    console.print(table)
    for reason, names in page.reasons(report).items():
        console.print(f"not replayed: {', '.join(names)} ({reason})", markup=False)
    for note in report.notes:
        console.print(note, markup=False)
    console.print(f"\n{report.reading}", markup=False)
    console.print(f"saved: {saved(files)}", markup=False, soft_wrap=True)
