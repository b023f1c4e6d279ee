"""HTML pages from the templates beside this file: one file each, without scripts, every text escaped."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import flowcorr
from flowcorr.diagnostics.drawing import Chart


def render(template: str, **values: Any) -> str:
    """The page that a template makes of these values."""
    return _environment().get_template(template).render(version=flowcorr.__version__, **values)


def save_charts(charts: Iterable[Chart], folder: Path, *, note: str = "") -> list[Path]:
    """Write each chart as `folder/<name>.png`, with `note` below it.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in charts:
        paths.append(folder / f"{chart.name}.png")
        paths[-1].write_bytes(chart.png(note))
    return paths


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("flowcorr.diagnostics"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
