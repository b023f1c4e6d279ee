"""Importance weights: their level, their cap, their mean over the batch.

All work on the excess `w - 1`, because weights of mean-pooled log-probs differ from 1 by 1e-4 or less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcorr.correction.bounds import Band
from flowcorr.correction.ratios import LogRatios, Scaled, above, below, bounded_expm1, sum_steps
from flowcorr.distributed import Group, add_up


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of steps `[B, T]` (level `token`) or of samples `[B]`, as excess over 1.

    Attributes:
        excess: after the cap.
        raw_excess: before it.
        high: 1 where the raw weight is above the upper threshold.
        low: 1 where it is below the lower threshold; for a cap that is its reciprocal.
        outside: 1 where the threshold changed the weight.
    """

    excess: Tensor
    raw_excess: Tensor
    high: Tensor
    low: Tensor
    outside: Tensor


def importance_weights(
    level: str, ratios: LogRatios, scaled: Scaled, threshold: float | Band
) -> tuple[Weights, Weights]:
    """Weights at their level, and each sample's mean of them (the same, where the level is of samples).

    Args:
        level: `token` weighs steps by `exp(scaled)`, `sequence` samples by `exp(sum_t scaled)`, `geometric` by
            `exp(mean_t scaled)`.
        threshold: as for `cap`.
    """
    if level == "token":
        weights = cap(scaled.excess, threshold)
        means = cap(sum_steps(scaled.excess).mul_(ratios.share), threshold)
        mean_excess = sum_steps(weights.excess * ratios.valid).mul_(ratios.share)
        return weights, replace(means, excess=mean_excess)
    exponent = scaled.sums if level == "sequence" else scaled.sums * ratios.share
    weights = cap(bounded_expm1(exponent), threshold)
    return weights, weights


def cap(raw_excess: Tensor, threshold: float | Band) -> Weights:
    """Cap weights at a number (TIS), or zero those outside a pair (IcePop).

    Source: truncated importance sampling, Ionides (2008), as used for rollout mismatch by Yao et al. (2025);
    IcePop, arXiv:2510.18855, eq. 3.
    """
    if isinstance(threshold, tuple):
        lower, upper = threshold
        high, low = above(raw_excess, upper - 1.0), below(raw_excess, lower - 1.0)
        outside = high + low
        return Weights(raw_excess.masked_fill(outside > 0.0, -1.0), raw_excess, high, low, outside)
    high, low = above(raw_excess, threshold - 1.0), below(raw_excess, 1.0 / threshold - 1.0)
    return Weights(raw_excess.clamp(max=threshold - 1.0), raw_excess, high, low, high)


def batch_mean(excess_sum: Tensor, count: Tensor, group: Group = None) -> Tensor:
    """The mean weight over all ranks from each rank's sum of excesses; 1 where it would be 0 or undefined."""
    total, terms = add_up(torch.stack((excess_sum, count)), "the mean weight", group)
    mean = 1.0 + total / terms
    return torch.where(mean > 0.0, mean, 1.0)
