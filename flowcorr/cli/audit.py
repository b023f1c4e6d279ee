"""An audit on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flowcorr.diagnostics.audit import AuditReport, page
from flowcorr.instruments.terminal import console_of, show_table

_STYLES = {"healthy": "bold green", "note": "bold", "warning": "bold yellow", "serious": "bold red"}


def show_audit(report: AuditReport, files: Sequence[Path], console: Console | None = None) -> None:
    """Print the verdict, what was measured, the reasons with the lines to paste, and where it was saved."""
    console = console_of(console)
    console.print(report.verdict, style=_STYLES[page.level(report)], markup=False)
    console.print()
    for line in page.facts(report):
        console.print(line, markup=False)
    acting = [outcome for outcome in report.presets if outcome.acts]
    tables = (
        ("delta log p by step, nats a latent element", page.STEP_HEADER, map(page.step_row, report.steps), 1),
        (
            f"weights without a cap ({page.SCALE_NOTE})",
            page.SCALE_HEADER,
            map(page.scale_row, report.scales),
            2,
        ),
        ("presets at their own thresholds", page.PRESET_HEADER, map(page.preset_row, acting), 1),
    )
    for title, header, rows, words in tables:
        cells = list(rows)
        if cells:
            console.print()
            show_table(console, header, cells, title=title, words=words)
    idle = ", ".join(outcome.name for outcome in report.presets if not outcome.acts)
    console.print(f"reject nothing and have no weights: {idle or 'none'}\n", markup=False)
    for reason in page.reasons(report):
        console.print(f"- {reason}", markup=False)
    if advised := page.in_words(report):
        console.print(f"\n{advised}\n", markup=False)
    for heading, lines, command in page.suggestions(report):
        console.print(f"\n{heading}:", markup=False)
        console.print(lines, markup=False)
        console.print(f"or, in a command: {command}\n", markup=False, soft_wrap=True)
    console.print(f"saved: {saved(files)}", markup=False, soft_wrap=True)


def saved(files: Sequence[Path]) -> str:
    """The files that a tool wrote, in words."""
    charts = sum(file.suffix == ".png" for file in files)
    others = ", ".join(str(file) for file in files if file.suffix != ".png")
    return f"{others} and {charts} chart{'s'[: charts != 1]} (.png) beside them"
