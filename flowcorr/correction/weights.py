"""Importance weights: their level and their cap."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr.correction.bounds import Band
from flowcorr.correction.exponents import bounded
from flowcorr.correction.ratios import LogRatios
from flowcorr.distributed import Group, add_up
from flowcorr.metrics import Stat


def raw_weights(level: str, ratios: LogRatios) -> Tensor:
    """`[B, T]` weights `exp(d)` (`token`), `exp(sum_t d)` (`sequence`) or `exp(mean_t d)` (`geometric`).

    `d` is the scaled log-ratio. The weight of a sample stands at each of its valid steps; elsewhere weights are 0.
    """
    exponent = ratios.scaled
    # Steps form a Markov chain: the ratio of two trajectories' densities is the product of their steps' ratios.
    if level == "sequence":
        exponent = exponent.sum(1, keepdim=True)
    elif level == "geometric":
        exponent = ratios.mean(exponent)[:, None]
    # Log-ratios are 0 at other terms, so that nothing infinite reaches the exp; here their weight of 1 becomes 0.
    return torch.where(ratios.valid, bounded(exponent).exp(), 0.0)


def band_of(cap: float | Band) -> Band:
    """The band `(1 / cap, cap)` for a number; a pair is a band already."""
    return cap if isinstance(cap, tuple) else (1.0 / cap, cap)


def capped(weights: Tensor, cap: float | Band) -> Tensor:
    """Cap weights at a number (TIS), or zero the weights outside a pair (IcePop).

    Source: truncated importance sampling, Ionides (2008), as used for rollout mismatch by Yao et al. (2025);
    IcePop, arXiv:2510.18855, eq. 3.
    """
    if isinstance(cap, tuple):
        low, high = cap
        return torch.where((weights < low) | (weights > high), 0.0, weights)
    return weights.clamp(max=cap)


def batch_mean(mean: Stat, group: Group = None) -> Tensor:
    """The mean weight of all ranks, from this rank's; 1 if it is 0 or undefined."""
    # Sum and count travel, and not means: a rank that kept fewer terms must count for less.
    parts = torch.stack([torch.as_tensor(part) for part in mean.parts])
    total, count = add_up(parts, "the mean weight", group)
    return torch.where(total > 0.0, total / count, 1.0)
