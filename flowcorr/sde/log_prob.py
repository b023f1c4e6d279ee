"""Log-probabilities and divergences of Gaussian steps, mean-pooled over the latent elements."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowcorr.errors import BatchError
from flowcorr.records import check_shape
from flowcorr.sde.transition import Transition, mean_over_elements

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def log_prob(
    next_latents: Tensor,
    transition: Transition,
    *,
    include_normalizer: bool = True,
    cps_unscaled: bool = False,
) -> Tensor:
    """Log-density of the latents that a step arrived at, a latent element.

    `mean_L(-(x' - mean)^2 / (2 s^2) - log s - log(2 pi) / 2)`. Pooled by the mean, `exp` of a difference is
    the D-th root of a density ratio. Source: Flow-GRPO, arXiv:2505.05470, section 4.2.

    Args:
        next_latents: `[B, *L]` or `[B, T, *L]`, like `transition.mean`; half precision is promoted.
        transition: the step's distribution.
        include_normalizer: whether `-log s - log(2 pi) / 2` is added. It cancels in every ratio of one step.
        cps_unscaled: return `mean_L(-(x' - mean)^2)`. Published Flow-CPS code calls this a log-probability, though it
            is no density; for runs that must agree with that code.

    Returns:
        `[B]` or `[B, T]`, nats per latent element.

    Raises:
        BatchError: shapes differ.
    """
    squared = _squared_distance("next_latents", next_latents, transition)
    # A mean over the elements, and not a sum: the log-density of a whole step is D times as large, and D is 65,536 for
    # an image of 512 pixels. A clip range of 1e-4 is meant for the mean.
    if cps_unscaled:
        return -squared
    scaled = -squared / (2 * transition.std.square())
    return scaled - transition.std.log() - HALF_LOG_TWO_PI if include_normalizer else scaled


def noise_variance(log_prob: Tensor, std: Tensor, *, cps_unscaled: bool = False) -> Tensor:
    """Mean square of the noise `(x' - mean) / s` of a step, from the `log_prob` that it was scored with.

    Args:
        log_prob: `[B]` or `[B, T]`, with its normaliser, as `log_prob` returns it.
        std: like `log_prob`.
        cps_unscaled: as `log_prob` was called.

    Returns:
        Like `log_prob`; 1 on average, with a variance of `2 / D`, if the noise is standard normal.
    """
    if cps_unscaled:
        return -log_prob / std.square()
    return -2 * (log_prob + std.log() + HALF_LOG_TWO_PI)


def kl(transition_p: Transition, transition_q: Transition) -> Tensor:
    """Exact `KL(p || q)` of two steps, a latent element; `r^2 / 2` if their standard deviations agree.

    Returns:
        `[B]` or `[B, T]`, nats per latent element; times the number of elements it is the step's KL.

    Raises:
        BatchError: shapes differ.
    """
    check_shape("transition_p.mean", transition_p.mean, tuple(transition_q.mean.shape))
    check_shape("transition_p.std", transition_p.std, tuple(transition_q.std.shape))
    # log(s_p / s_q) by log1p and expm1: exactly 0 for equal stds, and accurate for nearly equal ones.
    log_scale = torch.log1p((transition_p.std - transition_q.std) / transition_q.std)
    shift = step_kl(transition_p.mean, transition_q.mean, transition_q.std)
    return torch.expm1(2 * log_scale) / 2 - log_scale + shift


def step_kl(mean: Tensor, other_mean: Tensor, std: Tensor) -> Tensor:
    """Exact KL of two steps with one standard deviation, `mean_L((mean - other_mean)^2) / (2 s^2)`.

    Args:
        mean, other_mean: `[B, *L]` or `[B, T, *L]`.
        std: `[B]` or `[B, T]`.

    Returns:
        Like `std`, nats per latent element; NaN without a gradient if a mean is not finite or `std` is 0.

    Raises:
        BatchError: shapes differ.
    """
    shape = tuple(std.shape)
    if mean.dim() <= std.dim() or tuple(mean.shape[: std.dim()]) != shape:
        raise BatchError(f"mean has shape {list(mean.shape)}; it must begin with std's {list(shape)}")
    check_shape("other_mean", other_mean, tuple(mean.shape))
    difference = mean - other_mean
    # A mask behind the square would be too late: the gradient would be 0 times infinity.
    finite = difference.isfinite()
    squared = mean_over_elements(torch.where(finite, difference, 0.0).square(), std.dim())
    known = finite.flatten(std.dim()).all(-1) & (std > 0)
    return torch.where(known, squared / (2 * torch.where(known, std, 1.0).square()), torch.nan)


def centred_log_prob(
    log_prob: Tensor,
    mean: Tensor,
    rollout_mean: Tensor,
    std: Tensor,
    *,
    cps_unscaled: bool = False,
) -> Tensor:
    """Centre the score of a log-prob: subtract its mean under the rollout policy from the gradient, not the value.

    Under a rollout policy `q` other than the current one, the score has the mean
    `E_q[grad log p] = mean_L((mu_q - mu) / s^2 . grad mu)`. It pulls the policy towards the engine's or away from it,
    for any reward. The centred score is `mean_L((x' - mu_q) / s^2 . grad mu)`, the gradient at the engine's policy. It
    is not unbiased, since the states remain the ones that the engine visits. Source: score centering, arXiv:2609.20807,
    for Gaussian steps with a std that does not depend on the weights.

    Args:
        log_prob: `[B]` or `[B, T]`, from `log_prob`, differentiable.
        mean: `[B, *L]` or `[B, T, *L]`, step means of the current policy, differentiable.
        rollout_mean: like `mean`, of the policy that sampled.
        std: like `log_prob`, full standard deviations.
        cps_unscaled: as `log_prob` was called.

    Returns:
        Like `log_prob`, equal to the bit; NaN if a mean is not finite.

    Raises:
        BatchError: shapes differ.
    """
    kl = step_kl(mean, rollout_mean.detach(), std)
    return with_gradient_of(log_prob, 2 * std.square() * kl if cps_unscaled else kl)


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """`value` to the bit, with the gradient of `value + other`; NaN at elements of `other` that are not finite."""
    # The bracket is exactly 0, so only its gradient is added; `value + other - other.detach()` would round.
    return value + (other - other.detach())


def _squared_distance(name: str, latents: Tensor, transition: Transition) -> Tensor:
    check_shape(name, latents, tuple(transition.mean.shape))
    difference = latents.to(torch.promote_types(latents.dtype, transition.mean.dtype)) - transition.mean
    return mean_over_elements(difference.square(), transition.std.dim())
