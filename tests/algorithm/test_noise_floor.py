"""Distances of ratios from 1: their bins, and the interval of a quantile against the binomial law."""

import math

import pytest
import torch

from flowcorr.algorithm.noise_floor import (
    EDGES,
    clip_noise,
    interval_ranks,
    noise_counts,
    noise_quantile,
)
from flowcorr.metrics import Metrics


def counts_of(distances):
    """Counts of distances in clip ranges, as a loss would measure them."""
    log_ratio = torch.as_tensor(distances, dtype=torch.float64).reshape(-1, 1).mul(1e-3).log1p()
    return noise_counts(clip_noise(log_ratio, None, "step", 1e-3))


def binomial(count, quantile, numbers):
    return sum(
        math.comb(count, k) * quantile**k * (1 - quantile) ** (count - k) for k in numbers if 0 <= k <= count
    )


# Distances ------------------------------------------------------------------------------------------------


def test_every_term_falls_into_its_bin():
    inside = [0.0, 2.0**-16 * 1.01, 0.99, 1.01, 3.0, 2.0**15.9, 2.0**17]
    counts = counts_of(inside)
    ends = (0.0, *EDGES, math.inf)
    expected = [next(place for place in range(len(ends)) if value < ends[place + 1]) for value in inside]
    assert counts.nonzero().flatten().tolist() == expected
    assert counts.sum() == len(inside)
    assert {0.5, 1.0, 2.0} < set(EDGES)


def test_both_signs_count_and_what_is_masked_or_not_finite_does_not():
    log_ratio = torch.tensor([[-0.02, 0.02], [math.nan, 0.001], [0.5, math.inf]])
    mask = torch.tensor([[True, True], [True, True], [False, True]])
    metrics = clip_noise(log_ratio, mask, "step", 0.01)
    assert metrics.compute() == {"rollout_corr/clip_noise_fraction": pytest.approx(2 / 3)}
    assert noise_counts(metrics).sum() == 3


def test_a_range_of_its_own_for_each_term():
    log_ratio = torch.tensor([[0.02, 0.02]])
    limit = torch.tensor([[0.01, 0.1]], dtype=torch.float64)
    assert clip_noise(log_ratio, None, "step", limit).compute() == {"rollout_corr/clip_noise_fraction": 0.5}


@pytest.mark.parametrize(("level", "fraction"), [("trajectory_mean", 0.0), ("trajectory_sum", 0.5)])
def test_a_window_with_one_ratio_counts_once(level, fraction):
    log_ratio = torch.tensor([[0.008, 0.008], [0.02, -0.02]])
    metrics = clip_noise(log_ratio, None, level, 0.01)
    assert metrics.compute() == {"rollout_corr/clip_noise_fraction": fraction}
    assert noise_counts(metrics).sum() == 2


def test_micro_batches_add_up():
    log_ratio = 0.01 * torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    whole = clip_noise(log_ratio, None, "step", 0.01)
    parts = Metrics(*(clip_noise(rows, None, "step", 0.01) for rows in log_ratio.split(5)))
    assert torch.equal(noise_counts(parts), noise_counts(whole))
    assert parts.compute() == whole.compute()
    # The update's own copy of them, under actor/, is another producer's.
    assert torch.equal(noise_counts(whole.merge(whole.prefixed("actor/"))), noise_counts(whole))


# The quantile ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("count", [0, 1, 20, 96, 384])
def test_ranks_are_the_tightest_that_the_binomial_law_allows(count, quantile):
    low, high = interval_ranks(count, quantile, 0.95)
    # The low-th smallest term is above the quantile if fewer than `low` terms are below it.
    assert binomial(count, quantile, range(low)) <= 0.025
    assert binomial(count, quantile, range(low + 1)) > 0.025 or low == count
    assert binomial(count, quantile, range(high, count + 1)) <= 0.025
    assert binomial(count, quantile, range(high - 1, count + 1)) > 0.025
    assert 0 <= low < high <= count + 1


def test_large_samples_agree_with_the_normal_law():
    count, quantile = 160_000, 0.99
    spread = 1.959964 * math.sqrt(count * quantile * (1 - quantile))
    low, high = interval_ranks(count, quantile, 0.95)
    assert low == pytest.approx(count * quantile - spread, abs=3)
    assert high == pytest.approx(count * quantile + spread, abs=3)


@pytest.mark.parametrize(("count", "quantile"), [(96, 0.9), (400, 0.99), (1536, 0.99)])
def test_the_interval_covers_as_often_as_the_binomial_law_says(count, quantile):
    trials = 4000
    draw = torch.Generator().manual_seed(count)
    # Noise of steps of unequal size, with heavy tails: the law is of no distribution in particular.
    mixed = torch.randn(trials, count, generator=draw, dtype=torch.float64).abs()
    mixed *= 4.0 ** torch.randint(0, 3, (trials, count), generator=draw)
    scale = [1.0, 4.0, 16.0]
    # The true quantile, by bisection of the distribution function.
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        below = sum(math.erf(middle / size / math.sqrt(2)) for size in scale) / 3
        low, high = (middle, high) if below < quantile else (low, middle)
    truth = low
    first, last = interval_ranks(count, quantile, 0.95)
    ordered = torch.nn.functional.pad(mixed.sort(1).values, (1, 0), value=-math.inf)
    ordered = torch.nn.functional.pad(ordered, (0, 1), value=math.inf)
    covered = float(((ordered[:, first] <= truth) & (truth <= ordered[:, last])).double().mean())
    exact = binomial(count, quantile, range(first, last))
    assert exact >= 0.95
    assert covered == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / trials))
    for terms in mixed[:20]:  # bins only ever widen it
        binned = noise_quantile(counts_of(terms), quantile, 0.95)
        ends = torch.cat([terms.new_tensor([0.0]), terms.sort().values, terms.new_tensor([math.inf])])
        assert binned.low <= ends[first] < 1.1 * max(binned.low, EDGES[0])
        assert ends[last] <= binned.high <= 1.1 * max(ends[last], EDGES[0])
        assert binned.low < binned.value <= binned.high
        assert binned.count == count


def test_nothing_measured_and_nothing_but_zeros():
    empty = noise_quantile(torch.zeros(len(EDGES) + 1, dtype=torch.float64), 0.99, 0.95)
    assert math.isnan(empty.value)
    assert (empty.low, empty.high, empty.count) == (0.0, math.inf, 0)
    zeros = noise_quantile(counts_of(torch.zeros(500)), 0.99, 0.95)
    assert (zeros.low, zeros.value, zeros.high) == (0.0, EDGES[0], EDGES[0])
