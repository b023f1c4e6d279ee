"""Distance of ratios from 1 before anything was learned, in clip ranges.

Before any update, rounding and stale weights are the only causes. Distances are counted in bins: the counts of
micro-batches, ranks and training steps add up, and a quantile over all of them follows from the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributions import Binomial

from flowcorr.correction.exponents import bounded
from flowcorr.losses import RatioLevel, pool_log_ratio
from flowcorr.metrics import Metrics, Over, Stat

# Eight bins an octave from 2^-16 to 2^16 clip ranges: an end of an interval moves outwards by 9 % at most, and by
# nothing at a power of two.
EDGES = tuple(2.0 ** (index / 8) for index in range(-128, 129))
_COUNTS = "rollout_corr/clip_noise_counts"


def clip_noise(log_ratio: Tensor, mask: Tensor | None, level: RatioLevel, limit: float | Tensor) -> Metrics:
    """`rollout_corr/clip_noise_fraction`, the share of ratios outside the clip range, and their distances in bins.

    Args:
        log_ratio: `[B, T]`, of steps, as the loss exponentiates it.
        mask: `[B, T]` bool, terms that take part, or None for all.
        level: the level of the loss's ratio; a window's ratio counts once.
        limit: how far a ratio may be from 1: one number, or one a term, `[B, T]`. A cap limits one side only, but
            noise moves ratios to both sides, so both are counted.
    """
    valid = torch.isfinite(log_ratio) if mask is None else mask & torch.isfinite(log_ratio)
    distance = ratio_distance(log_ratio, valid, level)
    if level != "step":
        distance, valid = distance.amax(1), valid.any(1)  # the window's one ratio stands at every valid step
        limit = limit[:, 0] if isinstance(limit, Tensor) else limit
    distance = distance / limit
    bins = torch.bucketize(distance, edges(distance.device), right=True)
    # Sums of ones are exact in any order.
    counts = distance.new_zeros(len(EDGES) + 1).index_add(0, bins.flatten(), valid.double().flatten())
    return Metrics(
        {
            "rollout_corr/clip_noise_fraction": Over(valid).share(distance > 1),
            _COUNTS: Stat("counts", (counts,)),
        }
    )


def ratio_distance(log_ratio: Tensor, valid: Tensor, level: RatioLevel) -> Tensor:
    """`|ratio - 1|` `[B, T]` float64, 0 at terms not valid; a window's ratio stands at each of its valid steps.

    Args:
        log_ratio: `[B, T]`, of steps, as the loss exponentiates it.
        valid: `[B, T]` bool, terms that take part.
        level: the level of the loss's ratio.
    """
    pooled = pool_log_ratio(torch.where(valid, log_ratio, 0.0).double(), valid, level)
    return bounded(pooled).expm1().abs()


def noise_counts(metrics: Metrics) -> Tensor:
    """The counts `[len(EDGES) + 1]` of a training step, from its metrics of all ranks.

    Raises:
        KeyError: the step measured no noise.
    """
    counts = metrics.parts(_COUNTS)
    if not counts:
        raise KeyError(_COUNTS)
    return torch.tensor(counts, dtype=torch.float64).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantile:
    """A quantile of binned numbers with its confidence interval.

    Attributes:
        value: the quantile of the sample, to within its bin.
        low, high: ends of the interval, moved outwards to edges of bins; 0 or infinite if the sample is too small.
        count: terms of the sample.
    """

    value: float
    low: float
    high: float
    count: int


def noise_quantile(counts: Tensor, quantile: float, confidence: float) -> Quantile:
    """The quantile of the distribution that `counts` were drawn from, without a model of it.

    Of `n` independent terms, the number below the quantile `q` of their distribution is binomial with `n` and `q`, for
    any distribution. So the interval from the `l`-th to the `u`-th smallest term holds the quantile with
    the probability that a binomial number lies in `l .. u-1`. Source: David and Nagaraja, Order Statistics (2003),
    section 7.1.
    """
    below = counts.cumsum(0)
    count = int(below[-1])
    lower, upper = interval_ranks(count, quantile, confidence)
    ends = (0.0, *EDGES, math.inf)
    # Rank r lies in the first bin up to which r terms are found.
    places = torch.searchsorted(below, torch.tensor([lower, math.ceil(quantile * count), upper]).double())
    first, middle, last = places.tolist()
    return Quantile(
        value=ends[middle + 1] if count else math.nan,
        low=ends[first] if lower else 0.0,
        high=ends[last + 1] if upper <= count else math.inf,
        count=count,
    )


@lru_cache(maxsize=64)
def interval_ranks(count: int, quantile: float, confidence: float) -> tuple[int, int]:
    """Ranks of the two terms, in 1 to `count`, that enclose a quantile; 0 and `count + 1` for no such term."""
    tail = (1 - confidence) / 2
    numbers = torch.arange(count + 1, dtype=torch.float64)
    law = Binomial(count, torch.tensor(quantile, dtype=torch.float64)).log_prob(numbers).exp().cumsum(0)
    return int((law <= tail).sum()), int((law < 1 - tail).sum()) + 1


@lru_cache(maxsize=8)
def edges(device: torch.device) -> Tensor:
    """`EDGES` on a device."""
    return torch.tensor(EDGES, dtype=torch.float64, device=device)
