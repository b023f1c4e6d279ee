"""Stopping a run by a signal without losing the step in flight."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


class StopSignals:
    """Notes the first SIGINT or SIGTERM, so that the step in flight can end; the second stops at once.

    A context manager; on leaving it, the caller's own handlers are in force again.

    Args:
        say: told what happens next when a signal comes.

    Attributes:
        received: number of the signal that came, or None.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: int | None = None
        self._say = say
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        try:
            for number in self._NUMBERS:
                self._previous[number] = signal.signal(number, self._handle)
        except ValueError:
            logger.debug("handlers can be set in the main thread alone: signals are left to the caller")
        return self

    def __exit__(self, *_: object) -> None:
        self._hand_back()

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.received = number
        self._hand_back()
        self._say(f"{signal.Signals(number).name}: finishing this step and saving; again stops at once")

    def _hand_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
