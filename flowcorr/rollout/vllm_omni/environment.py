"""Environment variables of the engine's processes: the ones they inherit, and the ones only the trainer has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import torch

# How the ranks of a training job find one another; with these, an engine's workers would look for that job's.
RENDEZVOUS = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
)


def of_engine(device: torch.device, num_ranks: int, num_gpus: int = 1) -> dict[str, str | None]:
    """What to change for the engine of one rank; None removes a variable.

    Each engine is alone, whatever job its trainer belongs to. Left to itself, every one would take the first GPU.

    Args:
        device: where the rank trains.
        num_ranks: ranks on this machine.
        num_gpus: that the engine is spread over.
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
    """The GPUs of one rank's engine: some that no rank trains on, or else its trainer's own as well.

    Args:
        trainer: the GPU on which the rank trains; of several ranks, each trains on the GPU of its number.
        num_ranks: ranks on this machine.
        num_gpus: that the engine is spread over.
        visible: how many GPUs there are.
    """
    trainers = [trainer] if num_ranks == 1 else range(num_ranks)
    free = [gpu for gpu in range(visible) if gpu not in trainers]
    if len(free) >= num_ranks * num_gpus:
        begin = 0 if num_ranks == 1 else trainer * num_gpus
        return free[begin : begin + num_gpus]
    return [trainer] if num_ranks > 1 else [*free, trainer][-num_gpus:]


@contextlib.contextmanager
def changed(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, or remove them where the value is None, while the block runs."""
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
