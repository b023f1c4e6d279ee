"""Healthy ranges follow from the settings of a run."""

import math

import pytest
import torch

from flowcorr.instruments.limits import Units, healthy_range, limits_of, mean_gap_of, serious_limit, skew


def test_a_metric_without_a_rule_has_no_limits():
    assert healthy_range("actor/lr", Units()) == (-math.inf, math.inf)
    assert serious_limit("actor/lr", Units()) == math.inf


def test_the_range_of_a_metric_of_the_whole_update_is_that_of_the_batch():
    name = "rollout_corr/rejected_ratio"
    assert healthy_range(f"actor/{name}", Units()) == healthy_range(name, Units()) == (-math.inf, 0.05)
    assert serious_limit(name, Units()) == 0.1


def test_weights_are_judged_by_the_cap_of_the_run():
    name = "rollout_corr/rollout_is_raw_max"
    assert healthy_range(name, Units()) == (-math.inf, math.inf)
    assert healthy_range(name, Units(cap=2.0)) == (-math.inf, 2.0)


def test_more_terms_judge_the_noise_more_closely():
    name = "rollout/noise_std"
    few, many = (healthy_range(name, Units(num_elements=512, num_terms=count)) for count in (1, 100))
    assert few[0] < many[0] < 1 < many[1] < few[1]
    assert 1 - few[0] == pytest.approx(10 * (1 - many[0]))
    assert healthy_range(name, Units()) == (-math.inf, math.inf)


@pytest.mark.parametrize("gap", [0.01, 1.0, 30.0])
def test_the_gap_of_step_means_is_bounded_by_their_log_ratios(gap):
    """`delta = -r^2 / 2 + r z / sqrt(D)` for normal `z`, in nats a latent element after division by `D`."""
    elements = 512
    z = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    delta = -(gap**2) / 2 + gap * z / math.sqrt(elements)
    metrics = {"rollout_corr/logprob_abs_diff_mean": float(delta.abs().mean())}
    assert mean_gap_of(metrics, Units(num_elements=elements)) >= 0.99 * gap
    assert mean_gap_of(metrics, Units()) == mean_gap_of({}, Units(num_elements=elements)) == math.inf


def test_a_gap_of_the_largest_numbers_bounds_no_noise():
    units = Units(num_elements=512)
    rule = units.rule_of("rollout/noise_tails")
    assert limits_of(rule, units, mean_gap=1e150)[1] == math.inf


def test_fourth_moments_are_skewed_less_the_more_elements_there_are():
    noise = torch.randn(2000, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moments = (noise**4 - 6 * noise**2 + 3).mean(1) * math.sqrt(256 / 24)
    assert 1 < moments.max() / 6 < skew(256) < 1 + 16 / 15
    assert skew(65536) < skew(256)
