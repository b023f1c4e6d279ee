"""Gaps between rollout engine and actor, drawn at random."""

import math

import torch

from flowcorr.diagnostics.audit.gap import Gap

D = 512


def normal_gap(r, *, samples=4096, num_elements=D):
    """A gap of random direction and size `r` at two steps, as the model of the log-ratio has it."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn((samples, 2), generator=draw, dtype=torch.float64)
    return Gap(
        log_probs=-(r**2) / 2 + r / math.sqrt(num_elements) * noise,
        rollout_log_probs=torch.zeros_like(noise),
        step_kl=torch.full_like(noise, r**2 / 2),
        stds=torch.full_like(noise, 0.5),
        sigmas=torch.tensor([[1.0, 0.9]]).expand(samples, 2),
        step_indices=torch.tensor([[0, 1]]).expand(samples, 2),
    )
