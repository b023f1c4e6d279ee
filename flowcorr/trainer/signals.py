"""Stopping a run by a signal without losing the step in flight."""

from __future__ import annotations

import logging
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


class StopSignals:
    """Notes the first SIGINT or SIGTERM, so that the step in flight can end; the second stops at once.

    A context manager; on leaving it, the caller's own handlers are in force again.

    Args:
        say: told, in a thread, what happens next when a signal comes.

    Attributes:
        received: number of the signal that came, or None.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: int | None = None
        self._say = say
        self._previous: dict[int, Any] = {}
        # A handler may interrupt the very printing that it would do itself; putting into this queue is safe.
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._speaker = threading.Thread(target=self._speak, name="stop signals", daemon=True)

    def __enter__(self) -> StopSignals:
        self._speaker.start()
        try:
            for number in self._NUMBERS:
                self._previous[number] = signal.signal(number, self._handle)
        except ValueError:
            logger.debug("handlers can be set in the main thread alone: signals are left to the caller")
        return self

    def __exit__(self, *_: object) -> None:
        self._hand_back()
        self._news.put(None)
        self._speaker.join()

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.received = number
        self._hand_back()
        self._news.put(f"{signal.Signals(number).name}: finishing this step and saving; again stops at once")

    def _hand_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _speak(self) -> None:
        while (text := self._news.get()) is not None:
            self._say(text)
