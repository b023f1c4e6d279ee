"""Rollouts of random numbers, for tests that need records and no model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from flowcorr.records import Rollout, Window

WINDOW = {entry.name for entry in fields(Window)}


def make_rollout(
    samples: int = 4, steps: int = 2, shape: tuple[int, ...] = (3, 5), **changes: Any
) -> Rollout:
    """A rollout of two groups, with step means; `changes` are fields of the rollout or of its window."""
    draw = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(samples, *sizes, generator=draw)

    flat = torch.ones(samples, steps)
    values = {
        "latents": normal(steps, *shape),
        "next_latents": normal(steps, *shape),
        "step_indices": torch.arange(steps).repeat(samples, 1),
        "timesteps": 500 * flat,
        "sigmas": 0.5 * flat,
        "sigmas_next": 0.4 * flat,
        "means": normal(steps, *shape),
        "stds": 0.5 * flat,
        "log_probs": -1.2 + 0.1 * normal(steps),
        "group_ids": torch.arange(samples) // ((samples + 1) // 2),
        "policy_versions": torch.zeros(samples, dtype=torch.int64),
    } | changes
    window = {name: values.pop(name) for name in WINDOW}
    return Rollout(window=Window(**window), **values)


def columns(rollout: Rollout) -> dict[str, Any]:
    """The fields of a rollout and of its window by name, without window tensors that are None."""
    values = {entry.name: getattr(rollout, entry.name) for entry in fields(rollout)}
    return values.pop("window").columns() | values
