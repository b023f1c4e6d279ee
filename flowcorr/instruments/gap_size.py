"""Estimates the KL of two policies from log-ratios of samples, without the step means of both sides."""

from __future__ import annotations

import math

_ERRORS = 6.0  # standard errors between the two moments of `delta` that are no chance
FEWEST = 8  # terms: the error of fewer, from their own spread, is too small


def estimated_kl(mean: float, square: float, count: int, num_elements: int) -> float:
    """KL of the trainer from the rollout policy, nats a latent element, from moments of their log-ratios.

    For a gap of one size `m = r^2 / 2`, `delta` is normal with mean `-m` and variance `2 m / D`. Its mean square `m^2 +
    2 m / D` holds both moments, and the `m` that solves it is the maximum of the likelihood: of `D m` far below 1 it
    follows the spread, far above 1 the mean, each where it is the surer one.

    The mean alone is the KL of any two densities, whatever the gap is like: of a few samples alone, of sizes that
    differ, or a shift that all samples share, of which the spread tells nothing. Its error is the larger one for small
    gaps, so it is taken where that error is far below the distance of both moments. A shift upwards is the KL of no
    densities, and its size is taken.

    Args:
        mean: of `delta`, trainer less rollout.
        square: mean of `delta^2`.
        count: terms that these are the means of.
        num_elements: `D`.
    """
    of_spread, error = _spread(mean, square, count, num_elements)
    if count >= FEWEST and abs(mean + of_spread) > _ERRORS * error:
        return abs(mean)
    scaled = num_elements * num_elements * square
    return scaled / (1 + math.sqrt(1 + scaled)) / num_elements  # sqrt(1 + scaled) - 1 cancels


def moments_disagree(mean: float, square: float, count: int, num_elements: int) -> bool:
    """Whether noise of one size fails to explain both moments of `delta`; arguments as in `estimated_kl`."""
    if count < FEWEST:
        return False
    of_spread, error = _spread(mean, square, count, num_elements)
    chance = math.sqrt(2 / count)  # of a variance, relative; of a small one, of its logarithm
    shifted_up = mean > _ERRORS * error
    too_wide = of_spread + mean > _ERRORS * (error + of_spread * chance)
    too_even = of_spread * math.exp(_ERRORS * chance) + _ERRORS * error < -mean
    return shifted_up or too_wide or too_even


def _spread(mean: float, square: float, count: int, num_elements: int) -> tuple[float, float]:
    """The KL that the variance tells, and the standard error of the mean."""
    variance = max(square - mean * mean, 0.0) * count / max(count - 1, 1)
    return num_elements * variance / 2, math.sqrt(variance / count)
