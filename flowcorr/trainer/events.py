"""`events.jsonl`: one record for each event of a run, for finding out later why something went wrong."""

from __future__ import annotations

import json
import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flowcorr import distributed
from flowcorr.errors import ConfigError
from flowcorr.private import open_private

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
_MAX_BYTES = 2**28


class EventLog:
    """Appends `{"time": ..., "step": n, "kind": ..., ...}` to `events.jsonl`; a context manager.

    Times are UTC; `step` is the number of training steps done. Kinds are `start`, `resume`, `checkpoint`, `signal`,
    `given_up` (a step that failed after a signal), `tracker_failed`, `end`, `failure`, `fault` (of the engine);
    `workers` (where they run), `worker_lost`, `worker_restarted`, `worker_faulty` (taken out), `shard_retried` and
    `workers_lost` (all at once) of Ray's workers; `reward_failed` and `stale_dropped` of samples; `frames`, the rule by
    which each reward of images gets the frames of videos.

    Each record is appended as one whole line in one write. A resumed run keeps all earlier records, also those of steps
    that it repeats, and removes only a line that a crash left incomplete. A record that cannot be written, for example
    on a full disk, is a warning and not an error. With several ranks, each record names its rank.

    Args:
        folder: the run's folder.

    Attributes:
        step: the `step` of the next records.
    """

    def __init__(self, folder: Path) -> None:
        self.step = 0
        self._path = folder / EVENTS_FILE
        self._lock = threading.Lock()  # the events of workers come from threads
        self._file: int | None = None
        self._torn = False

    def __enter__(self) -> Self:
        try:
            self._file = open_private(str(self._path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            if distributed.is_main():
                _drop_torn_end(self._path)
        except OSError as error:
            self._warn(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Append a record."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        place = {"rank": distributed.rank()} if distributed.world_size() > 1 else {}
        record = {"time": now, "step": self.step, "kind": kind, **place, **fields}
        line = json.dumps(record, default=str).encode() + b"\n"
        with self._lock:
            if self._file is None:
                return
            line = b"\n" + line if self._torn else line
            try:
                self._torn = os.write(self._file, line) < len(line)
            except OSError as error:
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        logger.warning("%s cannot be written: %s", self._path, error.strerror or error)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The records of an `events.jsonl`; lines that are none are skipped.

    Raises:
        ConfigError: the file cannot be read, or is too large.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} holds more than {_MAX_BYTES} bytes, which no run's events do")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    records = []
    for line in text.split("\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and "kind" in record:
            records.append(record)
    return records


def _drop_torn_end(path: Path) -> None:
    text = path.read_bytes()
    if (end := text.rfind(b"\n") + 1) < len(text):  # else another rank may append its first record meanwhile
        os.truncate(path, end)
