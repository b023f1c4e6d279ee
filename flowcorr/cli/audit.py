"""An audit on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flowcorr.cli.printer import console_of, show_table
from flowcorr.diagnostics.audit import AuditReport, page
from flowcorr.diagnostics.audit.advice import BASIS, Kind, as_overrides

_STYLES: dict[Kind, str] = {
    "none": "bold green",
    "leave": "bold yellow",
    "correct": "bold yellow",
    "repair": "bold red",
}


def show_audit(report: AuditReport, files: Sequence[Path], console: Console | None = None) -> None:
    """Print what was measured, then the recommendation with the lines to paste, and where it was saved."""
    console = console_of(console)
    advice = report.advice
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
    if advice is None:
        console.print(page.NO_ADVICE, markup=False)
        console.print(f"saved: {saved(files)}", markup=False, soft_wrap=True)
        return
    console.print(advice.verdict, style=_STYLES[advice.kind], markup=False)
    for reason in (*advice.reasons, BASIS):
        console.print(f"- {reason}", markup=False)
    _show_lines(console, "\nreplace these keys of the recipe:", advice.yaml)
    if advice.alternative:
        _show_lines(console, "or bypass, with a clip range above the noise:", advice.alternative)
    console.print(f"saved: {saved(files)}", markup=False, soft_wrap=True)


def saved(files: Sequence[Path]) -> str:
    """The files that a tool wrote, in words."""
    charts = sum(file.suffix == ".png" for file in files)
    others = ", ".join(str(file) for file in files if file.suffix != ".png")
    return f"{others} and {charts} chart{'s'[: charts != 1]} (.png) beside them"


def _show_lines(console: Console, title: str, lines: str) -> None:
    console.print(title, markup=False)
    console.print(lines, markup=False)
    console.print(f"or, in a command: {as_overrides(lines)}\n", markup=False, soft_wrap=True)
