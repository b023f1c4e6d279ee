"""Stopping a run by a signal without losing the step in flight."""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

ECHO = 5.0  # seconds in which a second SIGTERM is the first one, by another way


class StopSignals:
    """Notes the first SIGINT or SIGTERM, so that the step in flight can end; the second stops at once.

    A SIGTERM soon after a SIGTERM is the same one: a scheduler that signals every process reaches a rank by itself and
    through its launcher.

    A context manager; on leaving it, the caller's own handlers are in force again.

    Args:
        say: told, in a thread, what happens next when a signal comes.

    Attributes:
        received: number of the signal that came, or None.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: int | None = None
        self._since = 0.0
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
        if self.received is not None:
            if time.monotonic() - self._since > ECHO:
                self._hand_back()
                signal.raise_signal(number)
            return
        self.received, self._since = number, time.monotonic()
        self._hand_back(*(signal.SIGINT,) if number == signal.SIGTERM else self._NUMBERS)
        self._news.put(f"{signal.Signals(number).name}: finishing this step and saving; again stops at once")

    def _hand_back(self, *numbers: int) -> None:
        """Put the caller's handlers back, of all signals where none is named."""
        for number in numbers or self._NUMBERS:
            if number in self._previous:
                signal.signal(number, self._previous.pop(number))

    def _speak(self) -> None:
        while (text := self._news.get()) is not None:
            self._say(text)
