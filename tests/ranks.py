"""Real processes that are ranks of one group: a test file starts itself once more for each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended."""

    code: int
    stdout: str
    stderr: str


def start_ranks(number: int, script: Path, *arguments: object) -> list[subprocess.Popen[str]]:
    """Start `python script *arguments` once a rank, with the environment that torchrun would give it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": path,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(number),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(number)
    ]


def end_with_first(processes: list[subprocess.Popen[str]], *, timeout: float) -> list[Ended]:
    """How each rank ended: the first by itself, the others then or because it had; none is left behind."""
    try:
        first = processes[0].communicate(timeout=timeout)
    finally:
        for process in processes[1:]:
            process.kill()
    outputs = [first, *(process.communicate() for process in processes[1:])]
    return [Ended(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def run_ranks(number: int, script: Path, *arguments: object, timeout: float = 900) -> None:
    """Start ranks, wait for them, and check that all succeeded."""
    processes = start_ranks(number, script, *arguments)
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}: {errors}"
