"""The time that each phase of a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from flowcorr.metrics import Stats, maximum, mean

PHASES = ("rollout", "reward", "old_log_prob", "correction", "update", "sync")


class Stopwatch:
    """Times named phases; each ends when the device has finished its work.

    The phases of `PHASES` always have a time, which may be 0; other phases only if they ran.

    Args:
        on_phase: called with the name of each phase as it begins.
        device: runs the work.
    """

    def __init__(self, on_phase: Callable[[str], None], device: torch.device) -> None:
        self._on_phase = on_phase
        self._device = device
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._begin = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._on_phase(phase)
        begin = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - begin

    def metrics(self, *, num_images: int) -> Stats:
        """`timing/<phase>` and `timing/step` in seconds on the slowest rank, and `perf/` of this step over all ranks.

        Args:
            num_images: number of images that all ranks sampled together.
        """
        step = time.perf_counter() - self._begin
        stats = {f"timing/{phase}": maximum(seconds) for phase, seconds in self._seconds.items()}
        stats["timing/step"] = maximum(step)
        stats["perf/images_per_second"] = mean(num_images, step)
        if self._device.type == "cuda":
            stats["perf/max_memory_gb"] = maximum(torch.cuda.max_memory_allocated(self._device) / 1e9)
        return stats
