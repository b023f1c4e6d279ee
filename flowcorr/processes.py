"""The signals that end a run, how its child processes are kept from them, and the shared memory of killed ones."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Collection, Iterator
from multiprocessing import shared_memory
from pathlib import Path

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGTERM)
"""The signals that ask a run to save and to end. A terminal sends the first three, a scheduler the last two."""
CHILDREN_IGNORE = tuple(number for number in STOP_SIGNALS if number != signal.SIGTERM)
"""Those of them that a child process is kept from. It ends by SIGTERM, also when its parent has died."""


class StopRequest(KeyboardInterrupt):
    """A signal that asked a run to end before its first step, when it had nothing to save.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def signal_mask(how: int, numbers: Collection[int]) -> Iterator[None]:
    """Block or unblock signals in this thread, and in the threads and processes that it starts meanwhile."""
    before = signal.pthread_sigmask(how, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Restore this process's handlers of `STOP_SIGNALS` after code that sets its own, such as Ray's or a tracker's."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # in another thread nothing can set them
            for number, handler in handlers.items():
                # None: it was not set from Python.
                if handler is not None and signal.getsignal(number) != handler:
                    signal.signal(number, handler)


def mark_shared_memory() -> None:
    """Put this process's identity into the names of the shared memory and the semaphores that it will create.

    vllm-omni's processes have half a gigabyte of them, under random names. Python's resource tracker removes them when
    their process is killed, but not if it is killed too, as with a whole process group or container.
    """
    # Python offers no other way to choose the names of memory that another package creates.
    mark = "/" + _mark(_pid_namespace(), os.getpid(), _start_time(os.getpid()))
    shared_memory._SHM_NAME_PREFIX = mark  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(mark) + 16  # type: ignore[attr-defined]
    multiprocessing.current_process()._config["semprefix"] = mark  # type: ignore[attr-defined]


def inherit_mark() -> None:
    """In a child of a process that has a mark, `mark_shared_memory`; elsewhere do nothing."""
    if multiprocessing.current_process()._config["semprefix"].startswith("/flowcorr-"):  # type: ignore[attr-defined]
        mark_shared_memory()


def clear_shared_memory(folder: Path = Path("/dev/shm")) -> None:
    """Remove shared memory and semaphores that carry the mark of a process that has died."""
    removed = 0
    for path in folder.glob("*flowcorr-*"):
        marks = _MARKED.match(path.name)
        if marks is None:
            continue
        namespace, pid, started = (int(number) for number in marks.groups())
        if namespace == _pid_namespace() and _start_time(pid) != started:
            with contextlib.suppress(OSError):  # it is another user's, or another run removes it too
                path.unlink()
                removed += 1
    if removed:
        logger.warning(
            "removed %d pieces of shared memory that killed processes have left in %s", removed, folder
        )


_MARKED = re.compile(r"(?:sem\.)?flowcorr-(\d+)-(\d+)-(\d+)-")


def _mark(namespace: int, pid: int, started: int | None) -> str:
    return f"flowcorr-{namespace}-{pid}-{started}-"


def _pid_namespace() -> int:
    """Processes of containers that share `/dev/shm` may have the same id."""
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine was; None if it has died."""
    try:
        # The name of the program, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
