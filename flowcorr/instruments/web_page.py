"""A report as one HTML page: one file without scripts, in which every text is escaped."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from markupsafe import escape

import flowcorr

if TYPE_CHECKING:
    from jinja2 import Environment


def web_page(report: Any) -> str:
    """The page of a `Report`."""
    return _environment().get_template("page.html").render(version=flowcorr.__version__, report=report)


def framed(report: Any) -> str:
    """The page in a frame, as a notebook shows it: neither takes the styles of the other."""
    style = "width: 100%; height: 480px; border: 1px solid #dfe4ea"
    return f'<iframe title="{escape(report.title)}" style="{style}" srcdoc="{escape(web_page(report))}"></iframe>'


def sentence(text: str) -> str:
    """A text with a full stop and a capital, but for the name of a file or a key that it begins with."""
    first = text.partition(" ")[0].rstrip(".,:;")
    is_name = any(mark in first for mark in "/._=")
    return f"{text[:1] if is_name else text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("flowcorr.instruments"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sentence"] = sentence
    return environment
