"""Stochastic transitions of a flow-matching sampler: from noise level `sigma` down to `sigma_next`.

A latent is `x = (1 - sigma) x0 + sigma x1` with data `x0` and noise `x1`, and the model's velocity is
`v = x1 - x0`. Every transition gives the mean and the full standard deviation of the Gaussian that the next
latents are drawn from, never a coefficient that is still to be multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from flowcorr.errors import BatchError, ConfigError, unknown_choice
from flowcorr.records import HIGHEST_NOISE_LEVEL, LOWEST_NOISE_LEVEL, check_shape

SdeType = Literal["sde", "cps", "dance_sde"]
NOISE_LEVEL_KEY = "sampling.noise_level"
# A first sigma that is 1 but for rounding: within one spacing of bfloat16, and much closer to 1 than to the next sigma.
# Second sigmas of flow-match Euler tables that begin at 1 are never so close, up to a shift of 256.
_BELOW_ONE = 2.0**-8
_SHARE_OF_STEP = 0.4


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """The Gaussian of one step, isotropic over the latent elements.

    Attributes:
        mean: `[B, *L]` or `[B, T, *L]`, float32 or float64.
        std: `[B]` or `[B, T]`, the full standard deviation.
        step: like `std`, `sigma - sigma_next`.
    """

    mean: Tensor
    std: Tensor
    step: Tensor


def transition(
    kind: SdeType,
    latents: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    noise_level: float | Tensor,
    *,
    sigma_max: float | Tensor | None = None,
) -> Transition:
    """Distribution of the next latents under one stochastic step of `kind`.

    Args:
        kind: a key of `TRANSITIONS`.
        latents: `[B, *L]` or `[B, T, *L]`, before the step; any latent rank.
        velocity: like `latents`, the model's output.
        sigma: `[B]` or `[B, T]`, noise level before the step; its axes are the batch axes of `latents`.
        sigma_next: like `sigma`, noise level after the step, smaller.
        noise_level: `eta`, a number or a tensor like `sigma`.
        sigma_max: stands in for `sigma` in the denominator of `sde` where `sigma` is 1, or so near that the table
            was rounded or begins at .9999; a number below 1 or a tensor like `sigma`; `sigma_next` by default.

    Returns:
        The transition, in float32, or in float64 if `latents` or `velocity` are.

    Raises:
        ConfigError: `kind` is unknown, or a number given as `noise_level` is outside its range.
        BatchError: shapes differ, or sigmas on the CPU do not descend from 1 to 0. On other devices the values are not
            read, as that would wait for the device; `check_schedule` checks their table beforehand.
    """
    if kind not in TRANSITIONS:
        raise ConfigError(unknown_choice("sampling.sde_type", kind, TRANSITIONS))
    if not isinstance(noise_level, Tensor):
        check_noise_level(kind, noise_level)
    latents, velocity = _same_float(latents, velocity)
    sigma, sigma_next, noise_level, sigma_max = _per_sample(
        latents, sigma, sigma_next, noise_level, sigma_max
    )
    if sigma.device.type == "cpu":
        _check_levels(kind, sigma, sigma_next)
    mean, std = TRANSITIONS[kind](latents, velocity, sigma, sigma_next, noise_level, sigma_max)
    return Transition(mean=mean, std=std, step=sigma - sigma_next)


def sample(transition: Transition, noise: Tensor) -> Tensor:
    """Next latents `mean + std noise`, for standard normal `noise` of the mean's shape."""
    check_shape("noise", noise, tuple(transition.mean.shape))
    return transition.mean + over_elements(transition.std, transition.mean) * noise


def added_noise(next_latents: Tensor, transition: Transition) -> Tensor:
    """The noise `(x' - mean) / s` that took a step to `next_latents`: standard normal if `sample` drew them."""
    check_shape("next_latents", next_latents, tuple(transition.mean.shape))
    return (next_latents - transition.mean) / over_elements(transition.std, transition.mean)


def _flow_grpo_sde(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor, sigma_max: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Flow-GRPO, arXiv:2505.05470, section 4.2: an SDE with the flow's marginals, by Euler-Maruyama."""
    # With c = eta sqrt(sigma / (1 - sigma)), the SDE is
    #   dx = (v + c^2 / (2 sigma) (x + (1 - sigma) v)) dsigma + c dw,
    # and one step of Euler-Maruyama takes it from sigma to sigma_next. At sigma = 1, c is infinite, so the first step
    # borrows a denominator from sigma_max.
    step = sigma - sigma_next
    at_one = 1 - sigma <= (_SHARE_OF_STEP * step).clamp(max=_BELOW_ONE)
    ceiling = sigma_next if sigma_max is None else sigma_max
    c = eta * torch.sqrt(sigma / (1 - torch.where(at_one, ceiling, sigma)))
    drift = c.square() * step / (2 * sigma)
    mean = over_elements(1 - drift, x) * x - over_elements(step + (1 - sigma) * drift, x) * v
    return mean, c * torch.sqrt(step)


def _flow_cps(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor, sigma_max: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Flow-CPS, arXiv:2509.05952: noise is exchanged, so that data and noise keep their coefficients."""
    # The next latents are (1 - sigma_next) x0 + sigma_next noise, as on the flow. The noise is a mix of the one that
    # the model predicts, x1, and of a new one; their squared coefficients add up to sigma_next^2.
    angle = eta * (math.pi / 2)
    x0 = x - over_elements(sigma, x) * v
    x1 = x + over_elements(1 - sigma, x) * v
    std = sigma_next * torch.sin(angle)
    kept_noise = sigma_next * torch.cos(angle)  # sqrt(sigma_next^2 - std^2)
    return over_elements(1 - sigma_next, x) * x0 + over_elements(kept_noise, x) * x1, std


def _dance_sde(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor, sigma_max: Tensor | None
) -> tuple[Tensor, Tensor]:
    """DanceGRPO, arXiv:2505.07818: a constant diffusion coefficient, its drift corrected by the score."""
    step = sigma - sigma_next
    # The score is -(x - (1 - sigma) x0) / sigma^2. With x0 = x - sigma v put in, one sigma cancels on paper; left to
    # floating point, the difference would lose its digits at small sigma.
    score = -(x + over_elements(1 - sigma, x) * v) / over_elements(sigma, x)
    mean = x - over_elements(step, x) * v + over_elements(eta.square() / 2 * step, x) * score
    return mean, eta * torch.sqrt(step)


TRANSITIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "sde": _flow_grpo_sde,
    "cps": _flow_cps,
    "dance_sde": _dance_sde,
}


def over_elements(values: Tensor, latents: Tensor) -> Tensor:
    """`values` `[B]` or `[B, T]` with axes of length 1 for the latent elements, to multiply `latents`."""
    return values.reshape(values.shape + (1,) * (latents.dim() - values.dim()))


def mean_over_elements(values: Tensor, batch_dims: int) -> Tensor:
    """Mean of `[B, *L]` or `[B, T, *L]` over `L`."""
    return values.flatten(batch_dims).mean(-1)


def _same_float(latents: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
    check_shape("velocity", velocity, tuple(latents.shape))
    dtype = reduce(torch.promote_types, (latents.dtype, velocity.dtype, torch.float32))
    return latents.to(dtype), velocity.to(dtype)


def _per_sample(
    latents: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    noise_level: float | Tensor,
    sigma_max: float | Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """All per-sample numbers in the dtype of `latents` and the shape of `sigma`."""
    for name, level in (("sigma", sigma), ("sigma_next", sigma_next)):
        if not isinstance(level, Tensor) or level.dim() == 0:
            raise BatchError(
                f"{name}={float(level):g} is one number; it must be a tensor [B] or [B, T]: give each sample its own"
            )
    shape = tuple(sigma.shape)
    if latents.dim() <= sigma.dim() or tuple(latents.shape[: sigma.dim()]) != shape:
        raise BatchError(
            f"sigma has shape {list(shape)} and latents {list(latents.shape)}; sigma must be [B] or [B, T], "
            "the leading axes of latents [B, *L] or [B, T, *L]"
        )
    check_shape("sigma_next", sigma_next, shape)

    def fill(name: str, value: float | Tensor) -> Tensor:
        if not isinstance(value, Tensor):
            return sigma.new_full(shape, value, dtype=latents.dtype)
        if value.dim() > 0:
            check_shape(name, value, shape)
        return value.to(latents.dtype).expand(shape)

    ceiling = None if sigma_max is None else fill("sigma_max", sigma_max)
    return sigma.to(latents.dtype), sigma_next.to(latents.dtype), fill("noise_level", noise_level), ceiling


def check_noise_level(kind: str, noise_level: float) -> None:
    """Raise `ConfigError` unless `kind` has a density at this noise level."""
    limit = 1.0 if kind == "cps" else math.inf
    if not (0.0 < noise_level <= limit and math.isfinite(noise_level)):
        allowed = "0 < noise_level <= 1" if kind == "cps" else "a finite number above 0"
        raise ConfigError(
            f"{NOISE_LEVEL_KEY}={noise_level} cannot be used with sampling.sde_type={kind}; choose {allowed}"
        )


def _check_levels(kind: str, sigma: Tensor, sigma_next: Tensor) -> None:
    if step := _first_step(sigma, sigma_next, ~(sigma > sigma_next)):
        raise BatchError(f"a step does not descend: {step}; every step needs sigma > sigma_next")
    if step := _first_step(sigma, sigma_next, (sigma > HIGHEST_NOISE_LEVEL) | (sigma_next < 0)):
        raise BatchError(
            f"{step} must be noise levels between 1 and 0; timesteps are num_train_timesteps times as large, mostly "
            "1000"
        )
    if step := _first_step(sigma, sigma_next, (sigma_next >= 1) | (sigma <= LOWEST_NOISE_LEVEL)):
        raise BatchError(
            f"a step has no density above 1 or below {LOWEST_NOISE_LEVEL:g}: {step}; keep the table of sigmas in "
            "float32, and leave such steps out of sampling.sde_window_range"
        )
    if kind == "cps" and not bool((sigma_next > LOWEST_NOISE_LEVEL).all()):
        raise BatchError(
            f"a cps step ends at sigma_next={float(sigma_next.min()):g}, where it adds no noise and has no density; "
            "end sampling.sde_window_range before the last step"
        )


def _first_step(sigma: Tensor, sigma_next: Tensor, is_odd: Tensor) -> str:
    """The first odd step's noise levels, in words; empty without one."""
    odd = is_odd.nonzero()
    if not len(odd):
        return ""
    place = tuple(odd[0].tolist())
    return f"sigma={float(sigma[place])} and sigma_next={float(sigma_next[place])}"
