"""How near gradient estimates from batches come to the on-policy gradient, from inner products of the batches.

Products of two different batches have no noise in common: their mean estimates the square of an expectation without the
bias that the square of a mean has. Intervals are jackknife ones over batches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# .975 quantiles of Student's t by degrees of freedom, from 1 on.
_STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Estimates of `K` batches beside on-policy ones with the same prompts and noise.

    Attributes:
        bias: length of the difference of both expectations, over that of the on-policy one.
        variance: of one batch's estimate around its expectation, over that of the on-policy one.
        cosine: mean cosine of one batch's estimate to the on-policy mean of all other batches.
        twin: mean cosine of one batch's estimate to the on-policy one with the same prompts and noise.
        gain: `twin` less that of another estimate from the same batches.
    """

    bias: Interval
    variance: float
    cosine: float
    twin: float
    gain: Interval


def assess(estimate: Tensor, on_policy: Tensor, other: Tensor) -> Quality:
    """Compare estimates with on-policy ones.

    Args:
        estimate: `[K, P]`, of each batch.
        on_policy: `[K, P]`, with the same prompts and noise.
        other: `[K, P]`, the estimate that `gain` is over.
    """
    estimate, on_policy, other = estimate.double(), on_policy.double(), other.double()
    difference = estimate - on_policy
    between, reference = difference @ difference.T, on_policy @ on_policy.T

    def squared_bias(kept: Tensor) -> float:
        return _across(between, kept) / _across(reference, kept)

    squared = _jackknife(squared_bias, len(estimate))
    roots = (math.sqrt(max(0.0, end)) for end in (squared.value, squared.low, squared.high))
    value, low, high = roots
    rest = on_policy.sum(0) - on_policy
    twins = _cosines(estimate, on_policy)
    return Quality(
        bias=Interval(value=value, low=low, high=high),
        variance=_noise(estimate @ estimate.T) / _noise(reference),
        cosine=float(_cosines(estimate, rest).mean()),
        twin=float(twins.mean()),
        gain=_paired(twins - _cosines(other, on_policy)),
    )


def on_policy_cosine(on_policy: Tensor) -> float:
    """The cosine that an on-policy batch has itself to the mean of all others."""
    every = on_policy.double()
    return float(_cosines(every, every.sum(0) - every).mean())


def _across(products: Tensor, kept: Tensor) -> float:
    """Mean of the products of different batches, of those kept."""
    part = products[kept][:, kept]
    return float((part.sum() - part.trace()) / (len(part) * (len(part) - 1)))


def _noise(products: Tensor) -> float:
    every = torch.arange(len(products))
    return float(products.diagonal().mean()) - _across(products, every)


def _cosines(estimate: Tensor, other: Tensor) -> Tensor:
    """`[K]`; 0 where nothing is left of a batch."""
    return torch.nn.functional.cosine_similarity(estimate, other, dim=1, eps=1e-30)


def _jackknife(statistic: Callable[[Tensor], float], count: int) -> Interval:
    every = torch.arange(count)
    left_out = [statistic(every[every != batch]) for batch in range(count)]
    mean = sum(left_out) / count
    error = math.sqrt((count - 1) / count * sum((one - mean) ** 2 for one in left_out))
    return _around(statistic(every), error, count)


def _paired(differences: Tensor) -> Interval:
    count = len(differences)
    return _around(float(differences.mean()), float(differences.std()) / math.sqrt(count), count)


def _around(value: float, error: float, count: int) -> Interval:
    width = _STUDENT[count - 2] * error
    return Interval(value=value, low=value - width, high=value + width)
