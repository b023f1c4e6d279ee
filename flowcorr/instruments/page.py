"""Shows a `Report` on the terminal, as JSON, as an HTML page with charts as files, and as an exit code.

The verdict is the first line everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

import flowcorr
from flowcorr.errors import BackendError, printable
from flowcorr.health.finding import Finding, Level
from flowcorr.instruments.outcome import Report, Table
from flowcorr.instruments.terminal import printing_on, show_table
from flowcorr.instruments.web_page import sentence, web_page

STYLES: Mapping[Level, str] = {
    "healthy": "bold green",
    "note": "bold",
    "warning": "bold yellow",
    "serious": "bold red",
}
_EXIT_CODES: Mapping[Level, int] = {"serious": 2, "warning": 1}
_MARKS = {"this": "bold", "idle": "dim", "": None}


def exit_code(report: Report) -> int:
    """Exit code of an instrument that examines: 0, 1 if the worst finding is a warning, 2 if it is serious."""
    return _EXIT_CODES.get(report.level, 0)


def as_json(report: Report) -> str:
    """The report as JSON, with the version that made it."""
    return json.dumps({"flowcorr": flowcorr.__version__} | report.to_mapping(), indent=2, allow_nan=False)


def save(report: Report, folder: Path, name: str) -> list[Path]:
    """Write `<name>.json`, `<name>.html` and the charts as PNG; the folder is made if it is missing.

    Raises:
        BackendError: the folder cannot be written to.
    """
    return _written(
        {folder / f"{name}.json": as_json(report) + "\n", folder / f"{name}.html": web_page(report)}
        | {folder / f"{chart}.png": data for chart, data in _pictures(report)}
    )


def save_page(report: Report, path: Path) -> list[Path]:
    """Write the page alone; its folder is made if it is missing.

    Raises:
        BackendError: it cannot be written.
    """
    return _written({path: web_page(report)})


def _written(files: Mapping[Path, str | bytes]) -> list[Path]:
    for path, data in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, data)
        except OSError as error:
            raise BackendError(
                f"{path} cannot be written ({error.strerror or error}); give another --out"
            ) from error
    return list(files)


def _pictures(report: Report) -> Iterator[tuple[str, bytes]]:
    """Every chart as PNG, with the names of its lines if it has several."""
    for section in report.charts:
        note = "; ".join(f"{mark}: {name}" for mark, name, _ in section.legend if mark != name)
        for name, picture in section.pictures.items():
            data = picture.png(note)
            if data is not None:
                yield name, data


def show(report: Report, files: Sequence[Path] = (), console: Console | None = None) -> None:
    """Print the verdict, the findings, the facts, the tables, and the paths of saved files."""
    with printing_on(console) as printer:
        _show(report, files, printer)


def _show(report: Report, files: Sequence[Path], console: Console) -> None:
    console.print(_line(report.verdict, STYLES[report.level]))
    for place, finding in enumerate(report.findings):
        heads = finding.text == report.verdict
        if not heads and not (place and _fits_a_line(finding) and _fits_a_line(report.findings[place - 1])):
            console.print()
        _show_finding(console, finding, heads=heads)
    facts = [fact.text for fact in report.facts if fact.text]
    if facts:
        console.print()
    for text in facts:
        console.print(_line(text))
    for table in report.tables:
        _show_table(console, table)
    if files:
        console.print()
        console.print(_line(f"saved: {_saved(files)}"), soft_wrap=True)


def _fits_a_line(finding: Finding) -> bool:
    """Whether there is nothing to do about a finding."""
    return not (finding.remedy or finding.keys)


def _show_finding(console: Console, finding: Finding, *, heads: bool) -> None:
    """Print a finding; its sentence is left out if it is the report's verdict."""
    quiet = "dim" if finding.level in ("note", "healthy") else ""
    evidence = _line(f"({finding.evidence})", "dim") if finding.numbers else Text()
    if not heads:
        head = _line(finding.level, STYLES[finding.level])
        head.append(_line(f" {finding.cause}: {sentence(finding.text)}", quiet))
        if _fits_a_line(finding) and finding.numbers:
            head.append(" ").append(evidence)
        console.print(head)
    if finding.numbers and (heads or not _fits_a_line(finding)):
        console.print(Padding(evidence, (0, 0, 0, 2)))
    if finding.remedy:
        console.print(Padding(_line(f"-> {sentence(finding.remedy)}", "" if quiet else "bold"), (0, 0, 0, 2)))
    if finding.keys:
        console.print(f"\n{finding.keys.rstrip()}", markup=False, soft_wrap=True)
        console.print(f"or, in a command: {finding.overrides}", markup=False, soft_wrap=True)


def _show_table(console: Console, table: Table) -> None:
    if not table.rows:
        return
    console.print()
    shown = [place for place in range(len(table.rows)) if table.mark(place) != "idle"]
    title = printable(f"{table.title} ({table.note})" if table.note else table.title)
    rows = [list(map(printable, table.cells(table.rows[place]))) for place in shown]
    if rows:
        styles = [_MARKS[table.mark(place)] for place in shown]
        show_table(console, table.header, rows, title=title, words=table.num_words, styles=styles)
    if idle := len(table.rows) - len(rows):
        which = f"{idle} more" if rows else f"{table.title}: all {idle}"
        console.print(_line(f"{which} without effect here; the saved page and JSON have them", "dim"))


def _line(text: str, style: str = "") -> Text:
    """A line of text without control characters, which names of a stranger's files and runs may hold."""
    return Text(printable(text), style)


def _saved(files: Sequence[Path]) -> str:
    charts = sum(file.suffix == ".png" for file in files)
    others = ", ".join(str(file) for file in files if file.suffix != ".png")
    return f"{others} and {charts} chart{'s'[: charts != 1]} (.png) beside them" if charts else others


def write(path: Path, data: str | bytes) -> None:
    """Write a file completely or not at all; a link in its place, as in a stranger's folder, is replaced.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".partial_{path.name}")
    partial.unlink(missing_ok=True)
    try:
        # Names of files may hold bytes that are no text, and JSON half of a character.
        partial.write_bytes(data if isinstance(data, bytes) else data.encode(errors="replace"))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
