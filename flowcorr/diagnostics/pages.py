"""HTML pages from the templates beside this file: one file each, without scripts, every text escaped."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import flowcorr
from flowcorr.diagnostics.drawing import Chart
from flowcorr.errors import BackendError


def render(template: str, **values: Any) -> str:
    """The page that a template makes of these values."""
    return _environment().get_template(template).render(version=flowcorr.__version__, **values)


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


def save_charts(charts: Iterable[Chart], folder: Path, *, note: str = "") -> list[Path]:
    """Write each chart as `folder/<name>.png`, with `note` below it.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in charts:
        paths.append(folder / f"{chart.name}.png")
        write(paths[-1], chart.png(note))
    return paths


def save_page(folder: Path, name: str, data: str, page: str, charts: Iterable[Chart]) -> list[Path]:
    """Write `<name>.json`, `<name>.html` and the charts as PNG.

    Args:
        folder: made if it is missing.
        name: of the tool.
        data: JSON.
        page: HTML.
        charts: those of the page.

    Returns:
        The files written.

    Raises:
        BackendError: the folder cannot be written to.
    """
    files = {folder / f"{name}.json": data + "\n", folder / f"{name}.html": page}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            write(path, text)
        return [*files, *save_charts(charts, folder)]
    except OSError as error:
        raise BackendError(
            f"the {name} cannot be written to {folder} ({error.strerror or error}); give another --out DIR"
        ) from error


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("flowcorr.diagnostics"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
