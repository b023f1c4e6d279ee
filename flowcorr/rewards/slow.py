"""A reward that takes long is named while the run waits for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def reported_when_slow(label: str, timeout: float | None, every: float = 60.0) -> Iterator[None]:
    """Log which reward is still computing `timeout` seconds after it was called, then once `every` seconds."""
    if timeout is None:
        yield
        return
    begin, done = time.monotonic(), threading.Event()

    def report() -> None:
        wait = min(timeout, threading.TIMEOUT_MAX)
        while not done.wait(wait):
            logger.warning(
                "reward %s has been computing for %.0f s, and the run waits for it",
                label,
                time.monotonic() - begin,
            )
            wait = every

    reporter = threading.Thread(target=report, name=f"waiting for reward {label}", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()
