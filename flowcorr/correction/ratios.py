"""Log-ratios of two policies over the terms that can be used, in float64.

`delta = target_log_prob - rollout_log_prob` is in nats per latent element, since log-probs are mean-pooled:
`exp(delta)` is the `D`-th root of a step's density ratio, not the ratio itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flowcorr.correction.bounds import SECTION
from flowcorr.errors import BatchError, ConfigError, unknown_choice

EXPONENT_BOUND = 20.0
SCALES = ("mean", "sqrt", "sum")


@dataclass(frozen=True, slots=True, eq=False)
class LogRatios:
    """`[B, T]` log-ratios with everything unusable set to zero.

    A term is valid if the mask has it on and its values are finite. All tensors are float64 and detached.

    Attributes:
        delta: `[B, T]`, target minus rollout log-prob; 0 where invalid.
        valid: `[B, T]`, 1 where valid, else 0.
        all_valid: whether `valid` is known to be 1 everywhere.
        step_kl: `[B, T]`, the exact KL of each step; 0 where invalid; None if unknown.
        delta_sum: `[B]`, sums of `delta` over steps.
        rollout_sum: `[B]`, sums of the rollout log-prob over valid steps.
        num_masked_on: `[B]`, terms that the mask has on.
        num_valid: `[B]`, valid terms.
        has_valid: `[B]`, 1 where the sample has a valid term, else 0.
        share: `[B]`, `1 / num_valid`, or 1 where there is none: sums over steps times it are means.
    """

    delta: Tensor
    valid: Tensor
    all_valid: bool
    step_kl: Tensor | None
    delta_sum: Tensor
    rollout_sum: Tensor
    num_masked_on: Tensor
    num_valid: Tensor
    has_valid: Tensor
    share: Tensor


def log_ratios(
    target_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor | None = None,
    step_kl: Tensor | None = None,
) -> LogRatios:
    """Compare two `[B, T]` log-probs where `mask` is on (everywhere, if None) and all values are finite."""
    rollout = rollout_log_prob.detach().to(torch.float64, copy=True)
    delta = target_log_prob.detach().to(torch.float64, copy=True).sub_(rollout)
    if mask is None and step_kl is None and _all_finite_on_cpu(delta):
        return _all_valid(delta, rollout)
    # x - x is 0 for a finite x and NaN for any other: validity as a float costs a third of a bool's.
    taint = delta - delta
    if step_kl is not None:
        step_kl = step_kl.detach().to(torch.float64, copy=True)
        taint += step_kl - step_kl
        step_kl = step_kl.add_(taint).nan_to_num_(0.0)
        delta += taint
    rollout = rollout.add_(taint).nan_to_num_(0.0)
    delta = delta.nan_to_num_(0.0, 0.0, 0.0)
    valid = taint.add_(1.0).nan_to_num_(0.0)
    num_masked_on = torch.full_like(delta[:, 0], delta.shape[1])
    if mask is not None:
        on = mask.bool().double()
        num_masked_on = sum_steps(on)
        valid, rollout, delta = valid.mul_(on), rollout.mul_(on), delta.mul_(on)
        step_kl = None if step_kl is None else step_kl.mul_(on)
    num_valid = sum_steps(valid)
    return LogRatios(
        delta=delta,
        valid=valid,
        all_valid=False,
        step_kl=step_kl,
        delta_sum=sum_steps(delta),
        rollout_sum=sum_steps(rollout),
        num_masked_on=num_masked_on,
        num_valid=num_valid,
        has_valid=num_valid.clamp(max=1.0),
        share=num_valid.clamp(min=1.0).reciprocal_(),
    )


def _all_finite_on_cpu(delta: Tensor) -> bool:
    """Whether everything is finite, where looking costs no copy to the host: a sum is, only if its terms are."""
    return delta.device.type == "cpu" and math.isfinite(delta.sum())


def _all_valid(delta: Tensor, rollout: Tensor) -> LogRatios:
    """The usual case without the passes that look for what is not finite."""
    samples, steps = delta.shape
    counts = torch.full((samples,), float(steps), dtype=torch.float64)
    return LogRatios(
        delta=delta,
        valid=delta.new_ones(()).expand_as(delta),
        all_valid=True,
        step_kl=None,
        delta_sum=sum_steps(delta),
        rollout_sum=sum_steps(rollout),
        num_masked_on=counts,
        num_valid=counts,
        has_valid=torch.ones_like(counts),
        share=torch.full_like(counts, 1.0 / steps),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """Log-ratios as weights, bands and veto see them.

    Attributes:
        values: `[B, T]`, `scale * delta`; 0 where invalid.
        excess: `[B, T]`, `expm1(values)` with bounded exponent.
        sums: `[B]`, sums of `values` over steps.
    """

    values: Tensor
    excess: Tensor
    sums: Tensor


def scaled_ratios(ratios: LogRatios, excess: Tensor, scale: float) -> Scaled:
    """`ratios` times `scale`; `excess` `[B, T]` is `expm1(delta)`."""
    if scale == 1.0:
        return Scaled(ratios.delta, excess, ratios.delta_sum)
    values = ratios.delta * scale
    return Scaled(values, bounded_expm1(values), ratios.delta_sum * scale)


def sum_steps(values: Tensor) -> Tensor:
    """`[B]` sums of `[B, T]` values; as a product with ones, which beats `sum` over a short last axis."""
    return torch.mv(values, _ones(values.shape[1], values.device))


@lru_cache(maxsize=32)
def _ones(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, dtype=torch.float64, device=device)


def above(values: Tensor, bound: float | Tensor) -> Tensor:
    """1 where `values > bound`, else 0, in float64: bools would have to be converted before they are summed."""
    return torch.gt(values, bound, out=torch.empty_like(values))


def below(values: Tensor, bound: float | Tensor) -> Tensor:
    """1 where `values < bound`, else 0, in float64."""
    return torch.lt(values, bound, out=torch.empty_like(values))


def on_steps(values: Tensor, like: Tensor) -> Tensor:
    """`[B]` values on each of a sample's steps, in the shape of `like` `[B, T]`.

    A copy, since arithmetic that broadcasts over a short last axis is three times slower than making it.
    """
    return values.unsqueeze(1).expand_as(like).contiguous()


def bounded_expm1(exponent: Tensor) -> Tensor:
    """`exp(exponent) - 1` with the exponent held within +-20, exact where the ratio is near 1."""
    return exponent.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).expm1_()


def scale_factor(scale: str | float, num_elements: int | None) -> float:
    """The factor on mean-pooled log-ratios: 1 (`mean`), `sqrt(D)` (`sqrt`), `D` (`sum`), or a number.

    `sum` makes `exp(scale delta)` the steps' density ratio; `sqrt` gives noise of one size whatever `D` is.

    Raises:
        ConfigError: the scale is unknown, or not positive.
        BatchError: the scale needs `num_elements`, and it is not given.
    """
    check_scale(scale)
    if not isinstance(scale, str):
        return float(scale)
    if scale == "mean":
        return 1.0
    if num_elements is None:
        raise BatchError(
            f"log_ratio_scale={scale!r} needs num_elements, the number of latent elements of a sample"
        )
    return math.sqrt(num_elements) if scale == "sqrt" else float(num_elements)


def check_scale(scale: object) -> None:
    """Raise `ConfigError` unless `scale` is the name of a scale or a positive number."""
    key = f"{SECTION}.log_ratio_scale"
    if isinstance(scale, str):
        if scale not in SCALES:
            raise ConfigError(unknown_choice(key, scale, (*SCALES, "a positive number")))
    elif isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ConfigError(f"{key}={scale!r} must be mean, sqrt, sum or a positive number")
