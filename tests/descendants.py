"""The processes below one, on a machine where any of them may end at any moment."""

from __future__ import annotations

import contextlib
import os

import psutil


def descendants(pid: int | None = None) -> dict[psutil.Process, str]:
    """What a process (by default this one) has started, and all that those started, with their names."""
    names = {}
    for process in psutil.Process(os.getpid() if pid is None else pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            names[process] = process.name()
    return names


def running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
