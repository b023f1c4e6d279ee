"""Log-ratios in float64, over the terms that can be used."""

from __future__ import annotations

import math

import pytest
import torch

from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct
from flowcorr.correction.ratios import log_ratios, one_sample


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_non_finite_step_reaches_nothing(bad, level):
    rollout = torch.zeros(3, 2)
    target = torch.full((3, 2), 0.01)
    target[1, 0] = bad
    for a, b in ((target, rollout), (rollout, target)):
        result = correct(a, b, rollout_is=level, rollout_rs="token_k1", rollout_rs_threshold=2.0)
        sample = level == "token"
        assert result.keep.tolist() == [[True, True], [False, sample], [True, True]]
        assert bool(result.weights.isfinite().all())
        assert result.weights[1, 0] == 0.0
        values = result.metrics.compute()
        assert all(math.isfinite(value) for value in values.values())
        assert values["rollout_corr/nonfinite_fraction"] == pytest.approx(1 / 6)
        assert values["rollout_corr/rejected_ratio"] == pytest.approx(1 / 3)


def test_a_batch_without_a_finite_term_is_rejected_and_says_so():
    bad = torch.full((2, 2), math.nan)
    result = correct(
        bad, torch.zeros(2, 2), rollout_is="sequence", rollout_rs="token", rollout_rs_threshold=2.0
    )
    values = result.metrics.compute()
    assert not bool(result.keep.any())
    assert values["rollout_corr/nonfinite_fraction"] == values["rollout_corr/rejected_ratio"] == 1.0
    assert all(math.isfinite(value) for value in values.values())
    assert "rollout_corr/kl" not in values
    assert "rollout_corr/logprob_abs_diff_max" not in values


def test_tiny_ratios_keep_their_digits():
    delta = torch.full((1000, 1), 1e-7, dtype=torch.float64)
    values = correct(delta, torch.zeros_like(delta), rollout_is="token").metrics.compute()
    assert values["rollout_corr/k3_kl"] == pytest.approx(5e-15, rel=1e-6)
    assert values["rollout_corr/chi2_token"] == pytest.approx(2e-7, rel=1e-6)
    assert values["rollout_corr/rollout_is_mean"] - 1.0 == pytest.approx(1e-7, rel=1e-6)


def test_terms_count_where_the_mask_is_on_and_all_values_are_finite():
    target = torch.tensor([[1.5, 2.0], [math.nan, 4.0]])
    step_kl = torch.tensor([[0.1, math.inf], [0.1, 0.2]])
    ratios = log_ratios(target, torch.ones(2, 2), torch.tensor([[1, 1], [1, 0]]), step_kl, scale=2.0)
    assert ratios.valid.tolist() == [[True, False], [False, False]]
    assert ratios.num_steps.tolist() == [1, 1]  # at least 1, as a divisor
    assert ratios.samples.where.tolist() == [True, False]
    assert ratios.delta.tolist() == [[0.5, 0.0], [0.0, 0.0]]
    assert torch.equal(ratios.scaled, 2 * ratios.delta)
    assert ratios.mean(torch.tensor([[6.0, 0.0], [0.0, 0.0]])).tolist() == [6.0, 0.0]


def test_the_resolution_is_four_ulps_of_the_larger_log_prob():
    target, rollout = torch.tensor([[-1.5, 0.2]]), torch.tensor([[-1.0, -3.0]])
    ulp = torch.tensor([[2.0**-23, 2.0**-22]], dtype=torch.float64)  # of 1.5 and 3
    assert torch.equal(log_ratios(target, rollout).resolution(), 4 * ulp)


def test_one_sample_repeats_its_log_ratio():
    ratios = one_sample(torch.tensor(0.5, dtype=torch.float64), 3, 2.0)
    assert ratios.scaled.tolist() == [[1.0, 1.0, 1.0]]
    assert ratios.step_kl.tolist() == [[0.125, 0.125, 0.125]]
