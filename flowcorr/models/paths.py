"""Finds a model: embedded in flowcorr, in a folder, or on the hub."""

from __future__ import annotations

import os
from pathlib import Path

from flowcorr.errors import ConfigError

EMBEDDED = {"tiny_ocr": Path(__file__).parent / "tiny_ocr"}


def resolve_path(path: str) -> str:
    """The folder of an embedded model, or `path` itself with its `~` expanded.

    Raises:
        ConfigError: `path` is written as a folder's and not as a name on the hub, and there is no such folder.
    """
    if path in EMBEDDED:
        return str(EMBEDDED[path])
    location = os.path.expanduser(path)
    if path.startswith(("/", "./", "../", "~")) and not os.path.isdir(location):
        raise ConfigError(
            f"model.path={path!r}: no such folder; give the folder of a diffusers pipeline, its name on the hub, or "
            f"one of {', '.join(EMBEDDED)}"
        )
    return location
