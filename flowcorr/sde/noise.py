"""Noise of one sample each, seeded by run, training step, group and member, so that batches may be cut in any way."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flowcorr.errors import BatchError


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed from `parts`, the same in every process and Python version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_globals(*parts: int | str) -> None:
    """Seed the global generators, which a user's code may draw from: torch on all devices, NumPy and `random`."""
    seed = stable_seed(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def generator(
    seed: int,
    training_step: int,
    group: int,
    member: int,
    *,
    stream: str = "noise",
    device: torch.device | str = "cpu",
) -> torch.Generator:
    """A generator for one purpose (`stream`) of one sample of one training step."""
    parts = (int(seed), int(training_step), int(group), int(member), stream)
    return torch.Generator(device).manual_seed(stable_seed(*parts))


def sample_noise(
    shape: Sequence[int],
    groups: Sequence[int],
    members: Sequence[int],
    *,
    seed: int,
    training_step: int,
    stream: str,
) -> Tensor:
    """Standard normal noise for each sample from its own generator, drawn on the CPU.

    Args:
        shape: `L`, of one sample.
        groups: prompt group of each of the `B` samples.
        members: place of each sample within its group.
        seed: the run's seed.
        training_step: the step that the rollout belongs to.
        stream: the purpose of the noise; streams are independent.

    Returns:
        `[B, *L]` float32, on the CPU so that every device starts from the same bits.
    """
    if len(groups) != len(members):
        raise BatchError(
            f"{len(groups)} groups and {len(members)} members were given; each sample needs one group and one member"
        )
    samples = list(zip(groups, members, strict=True))
    # Samples that share noise share one draw.
    places = {sample: place for place, sample in enumerate(dict.fromkeys(samples))}
    noise = torch.empty(len(places), *shape)
    for row, (group, member) in zip(noise, places, strict=True):
        row.normal_(generator=generator(seed, training_step, group, member, stream=stream))
    return noise if len(places) == len(samples) else noise[[places[sample] for sample in samples]]


def initial_noise(
    shape: Sequence[int],
    groups: Sequence[int],
    members: Sequence[int],
    *,
    seed: int,
    training_step: int,
    same_in_group: bool = False,
) -> Tensor:
    """The latents `[B, *L]` that trajectories start from; one per group with `same_in_group`."""
    members = [0] * len(members) if same_in_group else members
    return sample_noise(shape, groups, members, seed=seed, training_step=training_step, stream="initial")


def step_noise(
    shape: Sequence[int],
    groups: Sequence[int],
    members: Sequence[int],
    *,
    seed: int,
    training_step: int,
    step_index: int,
) -> Tensor:
    """The noise `[B, *L]` of one step of the schedule; it does not depend on the window."""
    stream = f"step {int(step_index)}"
    return sample_noise(shape, groups, members, seed=seed, training_step=training_step, stream=stream)
