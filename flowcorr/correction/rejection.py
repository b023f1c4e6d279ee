"""Rejection: divergences of steps and samples, held against bounds.

With `d = scale * delta`: `k1 = -d`, `k2 = d^2 / 2`, `k3 = expm1(d) - d` (Schulman, "Approximating KL
Divergence", 2020). Bounds of k1 are bounds of the ratio `exp(d) = exp(-k1)`. verl bounds `k1` itself, that is
the reciprocal ratio: the two agree on symmetric bands `[1/u, u]`, and differ on others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flowcorr.correction.bounds import Criterion
from flowcorr.correction.ratios import LogRatios, Scaled, above, below, sum_steps
from flowcorr.errors import BatchError

STEP_Z_MIN_TERMS = 8
MAD_TO_STD = 1.4826


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What one criterion finds: `[B, T]` for modes of steps, `[B]` for modes of samples.

    Attributes:
        value: the divergence; 0 where a step is invalid.
        high: 1 where it is above the upper bound; for k1, the ratio is.
        low: 1 where it is below the lower bound; for k1, the ratio is.
        out: 1 where it is either.
    """

    value: Tensor
    high: Tensor
    low: Tensor
    out: Tensor


def judge(criterion: Criterion, ratios: LogRatios, scaled: Scaled, robust_z: Tensor | None) -> Verdict:
    """Hold one mode's divergence against its bounds; `robust_z` `[B, T]` is for mode `step_z`."""
    value = _divergence(criterion.mode, ratios, scaled, robust_z)
    if criterion.bounds_ratio:
        high, low = below(value, -criterion.upper), above(value, -criterion.lower)
        return Verdict(value, high, low, high + low)
    high = above(value, criterion.upper)
    return Verdict(value, high, torch.zeros_like(high), high)


def _divergence(mode: str, ratios: LogRatios, scaled: Scaled, robust_z: Tensor | None) -> Tensor:
    if mode == "step_z":
        assert robust_z is not None
        return robust_z * ratios.valid
    if mode in ("step_kl", "seq_kl"):
        if ratios.step_kl is None:
            raise BatchError(f"rollout_rs={mode!r} needs step_kl, the exact KL from the rollout's step means")
        return ratios.step_kl if mode == "step_kl" else sum_steps(ratios.step_kl)
    if mode in _K1:
        return _K1[mode](ratios, scaled)
    level, _, estimator = mode.rpartition("_")
    steps = scaled.values.square().mul_(0.5) if estimator == "k2" else scaled.excess - scaled.values
    return _REDUCTIONS[level](steps, ratios)


_K1 = {
    "token_k1": lambda ratios, scaled: -scaled.values,
    "seq_sum_k1": lambda ratios, scaled: -scaled.sums,
    "seq_mean_k1": lambda ratios, scaled: scaled.sums * -ratios.share,
}
_REDUCTIONS = {
    "token": lambda steps, ratios: steps,
    "seq_sum": lambda steps, ratios: sum_steps(steps),
    "seq_mean": lambda steps, ratios: sum_steps(steps).mul_(ratios.share),
    "seq_max": lambda steps, ratios: steps.amax(1),  # k2 and k3 are not negative, and invalid steps hold 0
}


def robust_z(
    ratios: LogRatios,
    step_indices: Tensor | None,
    num_steps: int,
    *,
    floor: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`|delta - median| / (1.4826 MAD + floor)` of each term among those of its step index, over all ranks.

    A step index with fewer than 8 terms judges none of them (0). It is blind to a shift of the whole batch.

    Args:
        step_indices: `[B, T]` in `[0, num_steps)`; None takes the columns as steps.
        floor: `[B, T]`, differences that mean nothing.
    """
    delta, valid = ratios.delta, ratios.valid
    indices, rows = step_indices, num_steps
    if indices is None:
        rows = delta.shape[1]
        indices = torch.arange(rows, device=delta.device).repeat(len(delta), 1)
    all_delta, all_valid, all_indices = (_gather(x, group) for x in (delta, valid, indices))
    z = torch.zeros_like(delta)
    for step in range(rows):
        values = all_delta.masked_fill((all_valid == 0) | (all_indices != step), math.nan).flatten()
        median = values.nanquantile(0.5)
        mad = (values - median).abs().nanquantile(0.5)
        enough = values.isfinite().sum() >= STEP_Z_MIN_TERMS
        judged = (valid > 0) & (indices == step) & enough
        z = torch.where(judged, (delta - median).abs() / (MAD_TO_STD * mad + floor), z)
    return z


def _gather(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`values` of all ranks along the first axis."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts)


def log_prob_resolution(target_log_prob: Tensor, rollout_log_prob: Tensor) -> Tensor:
    """4 float32 ulps of the larger log-prob: differences below it are rounding."""
    size = torch.maximum(target_log_prob.detach().double().abs(), rollout_log_prob.detach().double().abs())
    _, exponent = torch.frexp(size.nan_to_num(0.0, 0.0, 0.0))
    return torch.ldexp(torch.full_like(size, 4.0), exponent - 24)


def idle_modes(
    criteria: tuple[Criterion, ...], values: Mapping[str, float], margin: float = 10.0
) -> list[str]:
    """Modes whose bounds lie more than `margin` times beyond the largest divergence that was measured.

    Such a band cannot act at the present noise floor; mean-pooled ratios and a band of 0.5..2.0 are the usual
    case. `values` are computed metrics, with or without a prefix before `rollout_corr/`.
    """
    return [criterion.mode for criterion in criteria if _is_idle(criterion, values, margin)]


def _is_idle(criterion: Criterion, values: Mapping[str, float], margin: float) -> bool:
    name = f"rollout_corr/rollout_rs_{criterion.mode}"
    largest = next((value for key, value in values.items() if key.endswith(f"{name}_max")), None)
    smallest = next((value for key, value in values.items() if key.endswith(f"{name}_min")), None)
    if largest is None or smallest is None:
        return False
    if not criterion.bounds_ratio:
        return margin * largest < criterion.upper
    return margin * largest < -criterion.lower and -margin * smallest < criterion.upper
