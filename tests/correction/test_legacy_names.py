"""Metrics under the names of verl's first dialect."""

from __future__ import annotations

import math

import torch

from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct


def test_legacy_names_are_added_on_request():
    delta = torch.tensor([[0.1, 0.2]])
    values = correct(delta, torch.zeros(1, 2), rollout_is="token", log_legacy_names=True).metrics.compute()
    assert values["mismatch/mismatch_kl"] == values["rollout_corr/kl"]
    assert values["mismatch/rollout_is_mean"] == values["rollout_corr/rollout_is_mean"]
    assert values["mismatch/rollout_is_masked_fraction"] == values["rollout_corr/rollout_rs_masked_fraction"]
    plain = correct(delta, torch.zeros(1, 2), rollout_is="token").metrics.compute()
    assert not any(name.startswith("mismatch/") for name in plain)
    assert set(plain) <= set(values)


def test_legacy_fractions_count_against_the_band_of_mode_mask():
    delta = torch.tensor([[1.0, 2.5], [0.4, 1.0]]).log()
    options = {"rollout_is": "token", "rollout_is_threshold": math.inf, "log_legacy_names": True}
    mask = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}
    values = correct(delta, torch.zeros_like(delta), **options, **mask).metrics.compute()
    assert values["mismatch/rollout_is_ratio_fraction_high"] == 0.25
    assert values["mismatch/rollout_is_ratio_fraction_low"] == 0.25
    assert values["mismatch/rollout_is_seq_fraction_high"] == 0.0
    assert values["rollout_corr/rollout_is_ratio_fraction_high"] == 0.0
