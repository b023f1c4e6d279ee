"""The steps outside the SDE window, which no log-prob covers, taken again from a rollout's own latents.

SDE steps outside the window (`sampling.sde_noise_range`) repeat the rollout's noise, which its seeds give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.models import DTYPES
from flowcorr.questions.compared import Compared, owners
from flowcorr.questions.legs import Repeated, repeat
from flowcorr.rollout.precision import NO_GAP
from flowcorr.rollout.sampler import step_outside


def window_units(window_gaps: Tensor, usual_gap: float) -> Tensor:
    """`[B]`: the unit of the errors outside the window.

    Rounding moves every step a little, in the window and outside. So the unit is the gap inside the window, and errors
    are about 1 for any precision, guidance and model. If the gap inside the window is larger than the precision
    explains, the largest explained gap is the unit.

    Args:
        window_gaps: `[B]`, relative errors of the velocity in the window.
        usual_gap: the largest that precision explains.
    """
    return window_gaps.clamp(NO_GAP, usual_gap)


@torch.no_grad()
def repeat_outside(compared: Compared) -> list[Repeated]:
    """Repeat all legs of a rollout; the actor has to hold the weights that sampled."""
    rollout, sampling, device = compared.rollout, compared.config.sampling, compared.rollout.log_probs.device
    # The timesteps that a transformer of `rollout.dtype` computes with, by the training stack's own schedule.
    schedule = compared.actor.family.in_dtype(compared.schedule, DTYPES[compared.config.rollout.dtype])

    def noise(index: int, rows: Tensor) -> Tensor | None:
        if index not in sampling.noisy_steps:
            return None
        groups, members = owners(rollout, rows)
        drawn = sde.step_noise(rollout.latent_shape, groups, members, **compared.seeds, step_index=index)
        return drawn.to(device)

    def take(index: int, latents: Tensor, drift: Tensor, rows: Tensor) -> Tensor:
        sigmas = schedule.sigmas[index : index + 2]
        return step_outside(latents, drift, sigmas, sampling, noise(index, rows))

    def step(index: int, latents: Tensor, rows: Tensor) -> Tensor:
        timesteps = latents.new_full((len(latents),), schedule.timesteps[index])
        return take(index, latents, compared.velocity(latents, timesteps, rows), rows)

    def stand_still(index: int, latents: Tensor, rows: Tensor) -> Tensor:
        return take(index, latents, torch.zeros_like(latents), rows)

    return repeat(compared.legs, step, stand_still)
