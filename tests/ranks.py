"""Real processes that are ranks of one group.

Most tests call functions in two ranks that are started once (`Ranks`, the fixture `two_ranks`). A test whose ranks die
or hang starts its own: the test file runs once more as a script for each of them.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.forks import FORKS

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended."""

    code: int
    stdout: str
    stderr: str


class Ranks:
    """Ranks that stay; each call runs one function in all of them.

    They are forks of a process that has imported the libraries, see `tests/forks.py`.
    """

    def __init__(self, number: int) -> None:
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(number):
            here, there = FORKS.Pipe()
            process = FORKS.Process(target=serve, args=(there, port, rank, number), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = 900) -> list[Any]:
        """What `function(*arguments)` returns on each rank. Where one fails, all are stopped."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers: dict[int, Any] = {}
        try:
            while len(answers) < len(self._pipes):
                missing = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
                ready = wait(missing, timeout)
                assert ready, f"ranks {[*missing.values()]} do not answer"
                for pipe in ready:
                    failure, answers[missing[pipe]] = pipe.recv()
                    assert not failure, f"rank {missing[pipe]}: {failure}"
        except BaseException:
            self.close()
            raise
        return [answers[rank] for rank in sorted(answers)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def serve(pipe: Connection, port: int, rank: int, number: int) -> None:
    """Be a rank, as torchrun and the trainer would have it, and call what the pipe brings."""
    import torch

    from flowcorr import distributed

    torch.set_num_threads(1)
    os.environ.update(rank_variables(port, rank, number))
    distributed.start_ranks("cpu", timeout=600)
    while True:
        function, arguments = pipe.recv()
        try:
            answer = None, function(*arguments)
        except Exception:
            answer = traceback.format_exc(), None
        except SystemExit as ending:  # a rank that exits answers with its exit code
            pipe.send((None, ending.code))
            raise
        pipe.send(answer)
        del answer
        gc.collect()
        gc.freeze()  # what was imported stays: the collector need not walk it again


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_variables(port: int, rank: int, number: int) -> dict[str, str]:
    """The environment that torchrun would give a rank."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(number),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def start_ranks(number: int, script: Path, *arguments: object) -> list[subprocess.Popen[str]]:
    """Start `python script *arguments` once a rank."""
    port = free_port()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": path,
                **rank_variables(port, rank, number),
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
