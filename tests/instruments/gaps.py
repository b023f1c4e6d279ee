"""Gaps between rollout engine and actor, drawn at random."""

import math

import torch

from flowcorr.records import Terms

D = 512


def normal_gap(r, *, samples=4096, num_elements=D):
    """A gap of random direction and size `r` at two steps, as the model of the log-ratio has it."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn((samples, 2), generator=draw, dtype=torch.float64)
    actor = -(r**2) / 2 + r / math.sqrt(num_elements) * noise
    return Terms(
        log_prob=actor,
        old_log_prob=actor,
        rollout_log_prob=torch.zeros_like(noise),
        advantage=torch.zeros_like(noise),
        std=torch.full_like(noise, 0.5),
        step=torch.full_like(noise, 0.1),
        step_index=torch.tensor([[0, 1]]).expand(samples, 2),
        sigma=torch.tensor([[1.0, 0.9]]).expand(samples, 2),
        old_rollout_kl=torch.full_like(noise, r**2 / 2),
        num_elements=num_elements,
    )
