"""Requests whose answers do not arrive are sent again.

`executor` removes the known fault by which vllm-omni loses answers. This module also covers other versions of
vllm-omni and other executors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for the next answer before the missing requests are sent again.

    Attributes:
        first: seconds to wait for the engine's first sample, during which it may compile kernels.
        least: lower limit of the seconds to wait after the first sample.
        factor: seconds to wait, as a multiple of the time that the missing samples should take at the measured speed.
        attempts: largest number of times that a request is sent.
    """

    first: float = 1800.0
    least: float = 600.0
    factor: float = 3.0
    attempts: int = 3

    def seconds(self, steps: int, seconds_per_step: float | None) -> float:
        """Seconds to wait for the next answer.

        Args:
            steps: denoising steps of all missing samples together.
            seconds_per_step: measured on the engine's samples; None before the first one.
        """
        if seconds_per_step is None:
            return self.first
        return max(self.least, self.factor * seconds_per_step * steps)


class PatientSender(Generic[Request, Answer]):
    """Sends requests, collects their answers, and sends requests without an answer again.

    Earlier attempts stay pending, and the first answer counts. So a slow engine that loses nothing only gets
    superfluous requests. All attempts of a request must have the same answer. Time is that of the event loop.

    Args:
        send: sends one request and returns its answer.
        patience: when to send again, and when to give up.
    """

    def __init__(self, send: Callable[[Request], Coroutine[Any, Any, Answer]], patience: Patience) -> None:
        self._send = send
        self._patience = patience
        self._seconds_per_step: float | None = None

    async def answers(self, requests: Sequence[Request], *, steps: int) -> list[Answer]:
        """The answers, in the order of `requests`.

        Args:
            requests: sent all at once.
            steps: denoising steps of each request; 0 if it draws no sample, and then its time is not measured.

        Raises:
            TimeoutError: answers are missing although their requests were sent `Patience.attempts` times.
        """
        clock = asyncio.get_running_loop().time
        began = latest = clock()
        answers: dict[int, Answer] = {}
        missing = set(range(len(requests)))
        tasks = self._sent(requests, missing)
        attempt = 1
        try:
            while missing:
                limit = self._patience.seconds(len(missing) * steps, self._seconds_per_step)
                done, _ = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                silence, latest = clock() - latest, clock()
                for task in done:
                    place = tasks.pop(task)
                    if place in missing:
                        answers[place] = task.result()
                        missing.remove(place)
                if done:
                    _cancel([task for task, place in tasks.items() if place not in missing])
                    if steps:
                        self._seconds_per_step = (latest - began) / (len(answers) * steps)
                    continue
                if attempt == self._patience.attempts:
                    raise TimeoutError(
                        f"{len(missing)} of {len(requests)} answers did not arrive within {silence:.0f} s, although "
                        f"their requests were sent {attempt} times"
                    )
                attempt += 1
                logger.warning(
                    "vllm-omni is alive, but has sent no answer for %.0f s; %d of %d are missing. It may have lost "
                    "them: their requests are sent again (attempt %d of %d), and the first answer counts. If this "
                    "recurs, leave out rollout.engine.distributed_executor_backend: flowcorr's own loses no answers",
                    silence, len(missing), len(requests), attempt, self._patience.attempts,
                )  # fmt: skip
                tasks |= self._sent(requests, missing)
            return [answers[place] for place in range(len(requests))]
        finally:
            _cancel(tasks)

    def _sent(self, requests: Sequence[Request], places: set[int]) -> dict[asyncio.Task[Answer], int]:
        return {asyncio.create_task(self._send(requests[place])): place for place in sorted(places)}


def _cancel(tasks: Any) -> None:
    for task in tasks:
        task.cancel()
