"""Stopping a run by a signal without losing work."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from flowcorr.processes import STOP_SIGNALS, StopRequest

logger = logging.getLogger(__name__)

REPEAT = 2.0  # seconds; a Ctrl-C that comes sooner after another signal is a held key, or the same one by another way
REACTION = 5.0  # seconds for the main thread to stop before the process is ended
AGAIN = (
    0.1  # seconds between signals to it meanwhile: one that comes just before a wait does not end that wait
)
Report = Callable[[int, bool], None]


class StopSignals:
    """Notes the first of `STOP_SIGNALS`, so that the run can finish its step and save. A context manager.

    Until `report_to` is called there is nothing to save, and a signal raises `StopRequest` in the main thread.

    Signals after the first change nothing: a scheduler, a launcher and a terminal may each send their own. But a Ctrl-C
    that comes `REPEAT` seconds or more after the signal before it is deliberate, and raises `KeyboardInterrupt` in the
    main thread. If that thread hangs in a call that is not Python's, the process ends without it, and so it does on one
    more deliberate Ctrl-C.

    The main thread sees signals only between its calls. So a thread reads them from the pipe that Python's handler
    writes to. On a deliberate Ctrl-C it sends the main thread SIGINTs until that one reacts, and does not count them.

    Args:
        clock: seconds, to tell a deliberate Ctrl-C from a held key.

    Attributes:
        received: number of the first signal, or None.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.received: int | None = None
        self._clock = clock
        self._report: Report | None = None
        self._forced = False  # the main thread is to stop at once
        self._reacted = False  # it has, or the run is over
        self._previous: dict[int, Any] = {}
        self._previous_pipe = -1
        self._pipe: tuple[int, int] | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            logger.debug("signal handlers can be set in the main thread only, so signals are the caller's")
            return self
        self._pipe = reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._previous_pipe = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup asks to go on without a terminal
            self._previous[number] = signal.signal(number, self._handle)
        # A forked process, such as a worker of a user's reward, gets the signals as if there were no run.
        os.register_at_fork(after_in_child=self._restore)
        self._start("signals", self._read, reader)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is None:
            return
        self._reacted = True
        os.write(self._pipe[1], b"\0")
        for thread in self._threads:
            thread.join()
        self._restore()
        for end in self._pipe:
            os.close(end)

    def report_to(self, report: Report) -> None:
        """From now on note the first signal, and call `report(number, False)` in a thread.

        A deliberate Ctrl-C after it is reported as `report(SIGINT, True)`.
        """
        self._report = report

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Python's handler of a signal, which runs in the main thread between two of its calls."""
        if self._report is None:
            self._restore()
            raise StopRequest(number)
        self.received = self.received or number
        if self._forced and not self._reacted:
            self._reacted = True
            raise KeyboardInterrupt

    def _read(self, reader: int) -> None:
        """Read signals in a thread, as soon as they come, and end the process if it cannot stop at once as asked."""
        main, signals = threading.main_thread().ident, select.poll()
        assert main is not None
        signals.register(reader, select.POLLIN)
        came: float | None = None
        sent, asked = (
            0,
            0.0,
        )  # SIGINTs of this thread that are on their way back, and when it asked the main thread
        while True:
            waits = self._forced and not self._reacted
            if not signals.poll(1000 * AGAIN if waits else None):
                if self._reacted:
                    continue
                if time.monotonic() >= asked + REACTION:
                    _end_process()
                sent += 1
                signal.pthread_kill(main, signal.SIGINT)
                continue
            number = os.read(reader, 1)[0]
            if number == 0:
                return
            if self._report is None or number not in STOP_SIGNALS:
                continue
            if sent and number == signal.SIGINT:
                sent -= 1
                continue
            before, came = came, self._clock()
            if before is None:
                self.received = self.received or number
                self._start("report of a signal", self._report, number, False)
            elif number == signal.SIGINT and came - before >= REPEAT:
                if self._forced:
                    _end_process()
                self._forced = True
                self._start("report of a signal", self._report, number, True)
                sent, asked = sent + 1, time.monotonic()
                signal.pthread_kill(main, signal.SIGINT)

    def _start(self, name: str, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(name=name, target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _restore(self) -> None:
        """Restore the caller's handlers, once."""
        if self._previous:
            signal.set_wakeup_fd(self._previous_pipe)
        while self._previous:
            signal.signal(*self._previous.popitem())


def _end_process() -> None:
    os._exit(128 + signal.SIGINT)
