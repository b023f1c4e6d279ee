from __future__ import annotations

import math

import pytest
import torch

from flowcorr.config import older_verl
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct


@pytest.fixture
def drift():
    generator = torch.Generator().manual_seed(0)
    rollout = torch.randn(16, 3, generator=generator)
    return rollout + 0.5 * torch.randn(16, 3, generator=generator), rollout, torch.ones(16, 3)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_shim(drift, level):
    old, rollout, mask = drift
    weights, kept, metrics = older_verl.compute_rollout_importance_weights(
        old, rollout, mask, rollout_is_level=level, rollout_is_mode="mask", rollout_is_threshold=1.5
    )
    rejection = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[level]
    today = correct(
        old,
        rollout,
        mask,
        rollout_is=level,
        rollout_is_threshold=math.inf,
        rollout_rs=rejection,
        rollout_rs_threshold=1.5,
    )
    assert torch.equal(weights, today.weights)
    assert torch.equal(kept, today.keep.float())
    assert 0 < kept.sum() < kept.numel()
    assert metrics["mismatch/rollout_is_masked_fraction"] == pytest.approx(1 - float(kept.mean()))
    assert all(name.startswith("mismatch/") for name in metrics)


def test_importance_weights_shim_is_off_without_a_threshold(drift):
    assert older_verl.compute_rollout_importance_weights(*drift) == (None, drift[2], {})


def test_offpolicy_metrics_shim(drift):
    old, rollout, mask = drift
    metrics = older_verl.compute_offpolicy_metrics(old, rollout, mask)
    assert metrics["kl"] == pytest.approx(float((rollout - old).double().mean()), rel=1e-6)
    assert {"k3_kl", "training_ppl", "ppl_ratio", "chi2_token", "chi2_seq"} <= set(metrics)


def test_offpolicy_metrics_of_the_training_policy_alone(drift):
    old, rollout, mask = drift
    both = older_verl.compute_offpolicy_metrics(old, rollout, mask)
    alone = older_verl.compute_offpolicy_metrics(old, None, mask)
    expected = {name: both[name] for name in ("training_ppl", "training_log_ppl")}
    assert alone == pytest.approx(expected, rel=1e-12)


def test_rejection_mask_shim(drift):
    old, rollout, mask = drift
    kept, metrics = older_verl.compute_rollout_rejection_mask(old - rollout, mask, "seq_mean_k3", 0.1)
    today = correct(old - rollout, torch.zeros_like(old), rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1)
    assert torch.equal(kept, today.keep.float())
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(
        float((kept.sum(1) == 0).float().mean())
    )


def named(delta, **keys):
    """All metrics of a correction, under today's names and those of the first dialect."""
    config = RolloutCorrectionConfig(**keys)
    log_probs = (delta, torch.zeros_like(delta), None)
    metrics = correct(*log_probs, **config.options).metrics
    return metrics.merge(older_verl.older_metrics(metrics, *log_probs, config)).compute()


def test_metrics_have_the_names_of_the_first_dialect_too():
    values = named(torch.tensor([[0.1, 0.2]]), rollout_is="token", rollout_is_batch_normalize=True)
    assert values["mismatch/mismatch_kl"] == values["rollout_corr/kl"]
    assert values["mismatch/rollout_is_mean"] == values["rollout_corr/rollout_is_mean"]
    assert values["mismatch/rollout_is_masked_fraction"] == values["rollout_corr/rollout_rs_masked_fraction"]
    assert {"mismatch/rollout_is_batch_norm_factor", "mismatch/chi2_token"}.isdisjoint(values)


def test_fractions_of_the_first_dialect_count_against_the_band_of_mode_mask():
    delta = torch.tensor([[1.0, 2.5], [0.4, 1.0]]).log()
    mask = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}
    values = named(delta, rollout_is="token", rollout_is_threshold=math.inf, **mask)
    assert values["mismatch/rollout_is_ratio_fraction_high"] == 0.25
    assert values["mismatch/rollout_is_ratio_fraction_low"] == 0.25
    assert values["mismatch/rollout_is_seq_fraction_high"] == 0.0
    assert values["rollout_corr/rollout_is_ratio_fraction_high"] == 0.0
