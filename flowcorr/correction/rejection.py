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
from torch import Tensor

from flowcorr.correction.bounds import EXACT_KL_MODES, Criterion
from flowcorr.correction.ratios import LogRatios, Scaled, above, below, sum_steps
from flowcorr.correction.robust import outlier_band
from flowcorr.distributed import Group, gather_rows
from flowcorr.errors import BatchError

Bound = float | Tensor


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


def judge(
    criterion: Criterion,
    bounds: tuple[Bound, Bound],
    ratios: LogRatios,
    scaled: Scaled,
    robust_z: Tensor | None,
) -> Verdict:
    """Hold one mode's divergence against its bounds; `robust_z` `[B, T]` is for mode `step_z`."""
    lower, upper = bounds
    value = _divergence(criterion.mode, ratios, scaled, robust_z)
    if criterion.bounds_ratio:
        high, low = below(value, -upper), above(value, -lower)
        return Verdict(value, high, low, high + low)
    high = above(value, upper)
    return Verdict(value, high, torch.zeros_like(high), high)


def _divergence(mode: str, ratios: LogRatios, scaled: Scaled, robust_z: Tensor | None) -> Tensor:
    if mode == "step_z":
        assert robust_z is not None
        return robust_z * ratios.valid
    if mode in EXACT_KL_MODES:
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


def measured_bounds(
    criterion: Criterion,
    ratios: LogRatios,
    scaled: Scaled,
    scale: float,
    *,
    rows: Tensor,
    num_rows: int,
    floor: Tensor,
    group: Group = None,
) -> tuple[Tensor, Tensor]:
    """Bounds, as a `Criterion` has them, that no noise of the batch passes; see `robust.outlier_band`.

    A log-ratio of noise is near normal. Other divergences are squares of such numbers, or sums of a few, and are
    judged by their cube roots, which are near normal again: Wilson and Hilferty, "The Distribution of
    Chi-Square", PNAS 17 (1931). Judged as they are, 96 of 100 clean batches of 96 terms would have outliers.

    Args:
        criterion: whose mode's divergence is measured.
        ratios, scaled: of the whole batch.
        scale: factor from the first to the second.
        rows: `[B, T]` int64 in `[0, num_rows)`: terms are compared with those of their row, samples with those
            that start in the same.
        num_rows: rows there can be.
        floor: 0-d, log-ratios that mean nothing, nats per latent element.
        group: ranks that share the batch.
    """
    mode = criterion.mode
    value = _divergence(mode, ratios, scaled, None)
    valid, rows = (ratios.valid, rows) if criterion.per_step else (ratios.has_valid, rows[:, 0])
    floor = gather_rows(floor.reshape(1), "the resolution of log-probs", group).amax()
    steps = ratios.delta.shape[1] if mode.startswith("seq_sum") or mode == "seq_kl" else 1
    if criterion.bounds_ratio:
        return outlier_band(-value, valid, rows, num_rows, floor=steps * scale * floor, group=group)
    size = floor if mode in EXACT_KL_MODES else scale * floor
    floor = (steps * size.square() / 2).pow(1 / 3)
    value = value.clamp(min=0.0)
    # k3 is a square only while it is small; beyond, it grows as `exp(d)`.
    square = value.log1p() if mode.endswith("k3") else value
    _, high = outlier_band(square.pow(1 / 3), valid, rows, num_rows, floor=floor, group=group)
    upper = high.clamp(min=0.0).pow(3)
    return upper.new_full((), -math.inf), upper.expm1() if mode.endswith("k3") else upper


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
    if criterion.auto:
        return False
    largest = next((value for key, value in values.items() if key.endswith(f"{name}_max")), None)
    smallest = next((value for key, value in values.items() if key.endswith(f"{name}_min")), None)
    if largest is None or smallest is None:
        return False
    if not criterion.bounds_ratio:
        return margin * largest < criterion.upper
    return margin * largest < -criterion.lower and -margin * smallest < criterion.upper
