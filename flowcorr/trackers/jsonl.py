"""The run folder: `metrics.jsonl`, one flat record a training step."""

from __future__ import annotations

import json
import logging
import math
import os
import reprlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flowcorr.errors import ConfigError
from flowcorr.private import open_private
from flowcorr.trackers.base import Ending, writing

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
IMAGES_FOLDER = "images"
MAX_BYTES = 2**30
"""The largest `metrics.jsonl` that is read."""
_LARGEST = 1e300  # so that sums of a few metrics are finite


class JsonlTracker:
    """Appends `{"step": n, ...}` to `metrics.jsonl`; the trainer writes images and films to the same folder.

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
        with writing(path):
            out_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is not None and path.exists():
                _drop_after(path, resume_step)
            mode = "w" if resume_step is None else "a"
            self._file = open(path, mode, encoding="utf-8", opener=open_private)  # noqa: SIM115

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Does nothing: every line of the file is a step, and a run folder holds its configuration anyway."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a record."""
        assert self._file is not None, "log before start"
        record = {"step": step} | {name: _finite_or_none(value) for name, value in metrics.items()}
        with writing(self._out_dir / METRICS_FILE):
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()

    def log_images(self, images: Mapping[str, Sequence[Image]], step: int) -> None:
        """Does nothing: the trainer writes images into the run folder anyway."""

    def log_videos(self, videos: Mapping[str, bytes], step: int) -> None:
        """Does nothing: the trainer writes films into the run folder anyway."""

    def finish(self, ending: Ending) -> None:
        """Close the file."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with writing(self._out_dir / METRICS_FILE):
            file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl` in the order of their steps, see `checked_metrics`.

    Raises:
        ConfigError: the file cannot be read, or is too large.

    Warns:
        UserWarning: something that is no record, or no metric, is left out.
    """
    records, odd = checked_metrics(path)
    if odd:
        warnings.warn(odd, UserWarning, stacklevel=2)
    return records


def checked_metrics(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Read the records of a `metrics.jsonl`, sorted by step, and list the parts left out, in words.

    A record has a `step`, and metrics that are numbers or None; a number that is not finite is None. A metric that its
    step has already is left out. A last line that a crash left incomplete is not mentioned.

    Raises:
        ConfigError: the file cannot be read, or is too large.
    """
    records: list[dict[str, Any]] = []
    logged: dict[int, set[str]] = defaultdict(set)  # by step
    odd: list[str] = []
    for number, line in _lines(path):
        try:
            record = _record(line)
        except ValueError as error:
            if line.endswith(b"\n"):
                odd.append(f"line {number}: {error}")
            continue
        odd += [f"line {number}: {problem}" for problem in _clean(record, logged[record["step"]])]
        records.append(record)
    records.sort(key=itemgetter("step"))
    return records, f"{path}: left out {len(odd)} lines or values, the first at {odd[0]}" if odd else ""


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers from 1 on."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} must be a file of at most {MAX_BYTES} bytes")
        with path.open("rb") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _clean(record: dict[str, Any], logged: set[str]) -> list[str]:
    """Remove entries that are no metric or already `logged`, and return them in words; add the others to `logged`."""
    problems = []
    for name, value in list(record.items()):
        if not name or not name.isprintable():
            problems.append(f"{reprlib.repr(name)} is no name of a metric")
        elif value is not None and type(value) not in (int, float):
            problems.append(f"{name}={reprlib.repr(value)} must be a number or null")
        elif value is None or (type(value) is float and not math.isfinite(value)):
            record[name] = None
            continue
        elif name != "step" and abs(value) > _LARGEST:
            problems.append(f"{name}={reprlib.repr(value)} must be a number up to {_LARGEST:g}")
        elif name != "step" and name in logged:
            problems.append(f"step {record['step']} has {name} already")
        else:
            continue
        del record[name]
    logged.update(record)
    return problems


def _drop_after(path: Path, last_step: int) -> None:
    """Rewrite the file, atomically, with its whole records up to `last_step`."""
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = "".join(f"{line}\n" for line in text.split("\n") if _is_up_to(line, last_step))
    if kept == text:
        return
    logger.info("%s: dropping what was logged after step %d", path, last_step)
    draft = path.with_suffix(".jsonl.tmp")
    with open(draft, "w", encoding="utf-8", opener=open_private) as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _is_up_to(line: str, last_step: int) -> bool:
    """Whether a line is a whole record of a step up to `last_step`."""
    try:
        return _record(line.encode())["step"] <= last_step
    except ValueError:
        return False


def _record(line: bytes) -> dict[str, Any]:
    """Parse the record of a line; raises `ValueError` if it is none."""
    try:
        record = json.loads(line.decode(), object_pairs_hook=_object, parse_constant=float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{reprlib.repr(line.strip())[1:]} is no JSON") from None
    if not isinstance(record, dict):
        raise ValueError(f"{reprlib.repr(record)} is no record of metrics")
    step = record.get("step")
    if type(step) is not int or not 0 <= step < 10**12:
        raise ValueError(f"step={reprlib.repr(step)} must be a whole number below 1e12")
    return record


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


def _finite_or_none(value: float) -> float | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
