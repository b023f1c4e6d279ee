"""How far a gap of velocities moves the means of SDE steps."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr.sde import SdeType, transition

# Root mean square of `x1 - x0`, at most, where the data have at most the variance of the noise.
_VELOCITY = 1.5


def distances(
    kind: SdeType, sigma: Tensor, sigma_next: Tensor, noise_level: float, velocity_gap: float
) -> Tensor:
    """The largest distance of two means of each step, in stds, that a gap of their velocities makes: `[T]` float64.

    Args:
        kind: of the transition.
        sigma, sigma_next: `[T]`, noise levels before and after the steps.
        noise_level: `eta`.
        velocity_gap: root mean square difference of the velocities, as a share of them.

    Raises:
        BatchError, ConfigError: see `flowcorr.sde.transition`.
    """
    unit = torch.ones_like(sigma)[:, None]
    moved, still = (
        transition(kind, 0 * unit, velocity, sigma, sigma_next, noise_level) for velocity in (unit, 0 * unit)
    )
    of_unit = (moved.mean - still.mean).abs()[:, 0] / moved.std
    return of_unit * _VELOCITY * velocity_gap
