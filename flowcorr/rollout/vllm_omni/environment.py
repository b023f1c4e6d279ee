"""Environment variables of the engine's processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import torch

# The ranks of a training job find one another by these; the engine's workers would try to join that job.
RENDEZVOUS = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
)


def of_engine(device: torch.device, num_ranks: int, num_gpus: int = 1) -> dict[str, str | None]:
    """The changes for the engine of one rank; None removes a variable.

    An engine does not join its trainer's distributed job, and gets GPUs of its own: by default every engine would
    take the first one.

    Args:
        device: the device on which the rank trains.
        num_ranks: ranks on this machine.
        num_gpus: GPUs of one engine.
    """
    changes: dict[str, str | None] = dict.fromkeys(RENDEZVOUS)
    changes |= {name: None for name in os.environ if name.startswith("TORCHELASTIC_")}
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]
        gpus = engine_gpus(device.index or 0, num_ranks, num_gpus, visible=len(names))
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu].strip() for gpu in gpus)
    return changes


def engine_gpus(trainer: int, num_ranks: int, num_gpus: int, *, visible: int) -> list[int]:
    """The GPUs of one rank's engine: free ones if there are enough, else also the one on which the rank trains.

    Args:
        trainer: the GPU on which the rank trains; with several ranks, rank i trains on GPU i.
        num_ranks: ranks on this machine.
        num_gpus: GPUs of one engine.
        visible: number of visible GPUs.
    """
    trainers = [trainer] if num_ranks == 1 else range(num_ranks)
    free = [gpu for gpu in range(visible) if gpu not in trainers]
    if len(free) >= num_ranks * num_gpus:
        begin = 0 if num_ranks == 1 else trainer * num_gpus
        return free[begin : begin + num_gpus]
    return [trainer] if num_ranks > 1 else [*free, trainer][-num_gpus:]


@contextlib.contextmanager
def changed(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables during the block; None removes one."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _apply(changes)
        yield
    finally:
        _apply(before)


def _apply(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
