"""The run folder: `metrics.jsonl`, one flat record a training step, and sample images as PNG files."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flowcorr.errors import BackendError

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
IMAGES_FOLDER = "images"


class JsonlTracker:
    """Appends `{"step": n, ...}` to `metrics.jsonl`, and saves `images/<name>_<step>_<number>.png`.

    The file is strict JSON: what is not finite is null. Each record is flushed, so that a run that is killed
    loses none; a run that is continued first drops a torn last line and all records after its checkpoint.

    Raises:
        BackendError: the folder cannot be written to, such as when the disk is full.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._out_dir = Path()

    def start(self, run_name: str, out_dir: Path, *, resume_step: int | None = None) -> None:
        """Open `metrics.jsonl`: anew, or to go on after `resume_step`."""
        self._out_dir = out_dir
        path = out_dir / METRICS_FILE
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is not None and path.exists():
                _drop_after(path, resume_step)
            self._file = path.open("w" if resume_step is None else "a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(path, error) from error

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Does nothing: every line of the file is a step, and a run folder holds its configuration anyway."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a record."""
        assert self._file is not None, "log before start"
        record = {"step": step} | {name: _finite_or_none(value) for name, value in metrics.items()}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self._out_dir / METRICS_FILE, error) from error

    def log_images(self, images: Mapping[str, Sequence[Image]], step: int) -> None:
        """Save the images as PNG files."""
        folder = self._out_dir / IMAGES_FOLDER
        try:
            folder.mkdir(exist_ok=True)
            for name, pictures in images.items():
                for number, picture in enumerate(pictures):
                    picture.save(folder / f"{name.replace('/', '_')}_{step:06d}_{number:02d}.png")
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def finish(self) -> None:
        """Close the file."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            raise _cannot_write(self._out_dir / METRICS_FILE, error) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, without lines that a crash left incomplete."""
    with path.open(encoding="utf-8") as file:
        records = [_parse(line) for line in file]
    return [record for record in records if record is not None]


def _drop_after(path: Path, last_step: int) -> None:
    """Rewrite the file, atomically, with its whole records up to `last_step`."""
    text = path.read_text(encoding="utf-8", errors="replace")
    pairs = ((line, _parse(line)) for line in text.split("\n"))
    kept = "".join(
        f"{line}\n" for line, record in pairs if record is not None and record["step"] <= last_step
    )
    if kept == text:
        return
    logger.info("%s: dropping what was logged after step %d", path, last_step)
    draft = path.with_suffix(".jsonl.tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _finite_or_none(value: float) -> float | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def _cannot_write(path: Path, error: OSError) -> BackendError:
    return BackendError(
        f"{path} cannot be written ({error.strerror or error}); free space or choose another folder"
    )
