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

ECHO = 5.0  # seconds in which a second SIGTERM counts as a duplicate of the first


class StopSignals:
    """Records the first SIGINT or SIGTERM, so that the current step can finish; the second stops the process at once.

    A SIGTERM soon after a SIGTERM is a duplicate: a scheduler that signals every process reaches a rank both directly
    and through its launcher.

    A context manager, which restores the caller's handlers on exit.

    Args:
        say: called in a thread with a message when a signal arrives.

    Attributes:
        received: number of the signal that arrived, or None.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: int | None = None
        self._since = 0.0
        self._say = say
        self._previous: dict[int, Any] = {}
        # A handler must not print, as it may interrupt a print; this queue is safe in a handler.
        self._messages: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._speaker = threading.Thread(target=self._speak, name="stop signals", daemon=True)

    def __enter__(self) -> StopSignals:
        self._speaker.start()
        try:
            for number in self._NUMBERS:
                self._previous[number] = signal.signal(number, self._handle)
        except ValueError:
            logger.debug(
                "signal handlers can be set in the main thread only, so signals are left to the caller"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self._messages.put(None)
        self._speaker.join()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._since > ECHO:
                self._restore()
                signal.raise_signal(number)
            return
        self.received, self._since = number, time.monotonic()
        self._restore(*(signal.SIGINT,) if number == signal.SIGTERM else self._NUMBERS)
        self._messages.put(
            f"{signal.Signals(number).name}: finishing this step and saving; again stops at once"
        )

    def _restore(self, *numbers: int) -> None:
        """Restore the caller's handlers: of the signals given, or of both."""
        for number in numbers or self._NUMBERS:
            if number in self._previous:
                signal.signal(number, self._previous.pop(number))

    def _speak(self) -> None:
        while (text := self._messages.get()) is not None:
            self._say(text)
