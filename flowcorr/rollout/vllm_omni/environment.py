"""The environment that the engine's processes inherit: what is to reach them, and what is the trainer's alone."""

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


def of_engine(device: torch.device, num_ranks: int) -> dict[str, str | None]:
    """What to change for the engine of one of `num_ranks` ranks, which trains on `device`; None removes a variable.

    Each engine is alone, whatever job its trainer belongs to, and where there are several it shares its trainer's GPU:
    left to itself, every one would take the first.
    """
    changes: dict[str, str | None] = dict.fromkeys(RENDEZVOUS)
    changes |= {name: None for name in os.environ if name.startswith("TORCHELASTIC_")}
    if device.type == "cuda" and num_ranks > 1:
        index = device.index or 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        changes["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index].strip() if visible else str(index)
    return changes


@contextlib.contextmanager
def changed(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, or remove those that are None, for as long as the block lasts."""
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
