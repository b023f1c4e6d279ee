"""Importance weights: levels, caps, normalisation."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct


def test_icepop_zeros_are_kept():
    delta = torch.tensor([[1.0, 0.0]])
    result = correct(delta, torch.zeros(1, 2), rollout_is="token", rollout_is_threshold="0.5_2")
    assert result.weights.tolist() == [[0.0, 1.0]]
    assert result.keep.tolist() == [[True, True]]
    assert result.metrics.compute()["rollout_corr/rollout_is_oob_ratio"] == 0.5


def test_weights_that_are_not_applied_only_reach_the_metrics():
    delta = torch.tensor([[1.0, math.nan]])
    result = correct(delta, torch.zeros(1, 2), rollout_is="sequence", rollout_is_apply=False)
    assert result.weights is None
    assert result.keep.tolist() == [[True, False]]
    assert result.metrics.compute()["rollout_corr/rollout_is_raw_max"] == pytest.approx(math.e)


@pytest.mark.parametrize(("level", "expected"), [("token", [[0.5, 1.5], [1.0, 1.0]]), ("sequence", None)])
def test_batch_normalisation_gives_a_mean_of_one(level, expected):
    ratio = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    mask = torch.tensor([[1, 1], [1, 1]])
    result = correct(
        ratio.log(),
        torch.zeros(2, 2),
        mask,
        rollout_is=level,
        rollout_is_threshold=3.5,
        rollout_is_batch_normalize=True,
    )
    if expected is not None:
        torch.testing.assert_close(result.weights, torch.tensor(expected))
    assert float(result.weights.mean()) == pytest.approx(1.0)
    factor = result.metrics.compute()["rollout_corr/rollout_is_batch_norm_factor"]
    assert factor == pytest.approx({"token": 2.0, "sequence": 3.25}[level])


def test_batch_normalisation_of_vanishing_weights_leaves_them():
    delta = torch.full((2, 2), 3.0)
    result = correct(
        delta,
        torch.zeros(2, 2),
        rollout_is="token",
        rollout_is_threshold=(0.5, 2.0),
        rollout_is_batch_normalize=True,
    )
    assert torch.equal(result.weights, torch.zeros(2, 2))


def test_scale_sum_is_the_density_ratio_of_normal_distributions():
    torch.manual_seed(0)
    num_elements, std = 64, 0.3
    mean_a = torch.randn(5, num_elements, dtype=torch.float64)
    mean_b = mean_a + 0.02 * torch.randn(5, num_elements, dtype=torch.float64)
    sample = mean_b + std * torch.randn(5, num_elements, dtype=torch.float64)
    log_a = torch.distributions.Normal(mean_a, std).log_prob(sample)
    log_b = torch.distributions.Normal(mean_b, std).log_prob(sample)
    result = correct(
        log_a.mean(1, keepdim=True),
        log_b.mean(1, keepdim=True),
        rollout_is="token",
        rollout_is_threshold=math.inf,
        log_ratio_scale="sum",
        num_elements=num_elements,
    )
    density_ratio = (log_a - log_b).sum(1, keepdim=True).exp()
    torch.testing.assert_close(result.weights.double(), density_ratio, rtol=1e-6, atol=0)


@pytest.mark.parametrize("exponent", [-25.0, -16.0, 0.0])
def test_effective_sample_size_of_small_weights(exponent):
    delta = exponent + torch.tensor([[0.0], [0.1], [0.3]], dtype=torch.float64)
    weights = delta.clamp(min=-20.0).exp().flatten().tolist()
    values = correct(delta, torch.zeros_like(delta), rollout_is="token").metrics.compute()
    share = sum(weights) ** 2 / (3 * sum(weight**2 for weight in weights))
    assert values["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(share, rel=1e-12)
    assert values["rollout_corr/rollout_is_std"] == pytest.approx(statistics.stdev(weights), rel=1e-9)
