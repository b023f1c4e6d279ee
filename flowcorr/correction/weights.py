"""Importance weights: their level, their cap, their mean over the batch.

All work on the excess `w - 1`, because weights of mean-pooled log-probs differ from 1 by 1e-4 or less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from flowcorr.correction.bounds import Band
from flowcorr.correction.ratios import LogRatios, bounded_expm1, sum_steps


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of steps `[B, T]` (level `token`) or of samples `[B]`, as excess over 1.

    Attributes:
        excess: after the cap.
        raw_excess: before it.
        high: bool, raw weight above the upper threshold.
        low: bool, raw weight below the lower threshold; for a cap that is its reciprocal.
        outside: bool, weights that the threshold changed.
    """

    excess: Tensor
    raw_excess: Tensor
    high: Tensor
    low: Tensor
    outside: Tensor


def importance_weights(
    level: str, ratios: LogRatios, scaled: Tensor, scaled_excess: Tensor, threshold: float | Band
) -> tuple[Weights, Weights]:
    """Weights at their level, and each sample's mean of them (the same, where the level is of samples).

    Args:
        level: `token` weighs steps by `exp(scaled)`, `sequence` samples by `exp(sum_t scaled)`, `geometric` by
            `exp(mean_t scaled)`.
        scaled: `[B, T]` log-ratios, 0 where invalid.
        scaled_excess: `[B, T]`, `expm1` of them with bounded exponent.
        threshold: as for `cap`.
    """
    if level == "sequence":
        weights = cap(bounded_expm1(sum_steps(scaled)), threshold)
        return weights, weights
    share = 1.0 / ratios.num_valid.clamp(min=1.0)
    if level == "geometric":
        weights = cap(bounded_expm1(sum_steps(scaled).mul_(share)), threshold)
        return weights, weights
    weights = cap(scaled_excess, threshold)
    means = cap(sum_steps(scaled_excess) * share, threshold)
    return weights, replace(means, excess=sum_steps(weights.excess * ratios.valid) * share)


def cap(raw_excess: Tensor, threshold: float | Band) -> Weights:
    """Cap weights at a number (TIS), or zero those outside a pair (IcePop).

    Source: truncated importance sampling, Ionides (2008), as used for rollout mismatch by Yao et al. (2025);
    IcePop, arXiv:2510.18855, eq. 3.
    """
    if isinstance(threshold, tuple):
        lower, upper = threshold
        high, low = raw_excess > upper - 1.0, raw_excess < lower - 1.0
        outside = high | low
        return Weights(raw_excess.masked_fill(outside, -1.0), raw_excess, high, low, outside)
    high, low = raw_excess > threshold - 1.0, raw_excess < 1.0 / threshold - 1.0
    return Weights(raw_excess.clamp(max=threshold - 1.0), raw_excess, high, low, high)


def batch_mean(excess_sum: Tensor, count: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The mean weight over all ranks from each rank's sum of excesses; 1 where it would be 0 or undefined."""
    total = torch.stack((excess_sum, count))
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    mean = 1.0 + total[0] / total[1]
    return torch.where(mean > 0.0, mean, 1.0)
