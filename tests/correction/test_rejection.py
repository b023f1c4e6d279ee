"""Rejection by bands, the veto, and thresholds that are measured."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr.correction import ABSOLUTE, RS_MODES, Bounds, Mode
from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct
from flowcorr.correction.rejection import widened

MODES = [name for name, mode in RS_MODES.items() if mode.needs is None]


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=6, max_size=6),
    st.floats(1.001, 5.0),
    st.floats(1.0, 3.0),
    st.sampled_from(MODES),
)
@settings(max_examples=60, deadline=None)
def test_a_wider_band_keeps_more(deltas, threshold, factor, mode):
    delta = torch.tensor(deltas).view(3, 2)
    narrow, wide = (
        correct(delta, torch.zeros_like(delta), rollout_rs=mode, rollout_rs_threshold=bound).keep
        for bound in (threshold, threshold * factor)
    )
    assert bool((wide | ~narrow).all())


@given(
    st.lists(st.floats(-40, 40, width=32), min_size=6, max_size=6),
    st.sampled_from([None, *MODES]),
)
@settings(max_examples=40, deadline=None)
def test_rejection_never_changes_weights_and_weights_are_bounded(deltas, mode):
    delta = torch.tensor(deltas).view(3, 2)
    plain = correct(delta, torch.zeros_like(delta), rollout_is="token", rollout_is_threshold=math.inf)
    rejecting = correct(
        delta,
        torch.zeros_like(delta),
        rollout_is="token",
        rollout_is_threshold=math.inf,
        rollout_rs=mode,
        rollout_rs_threshold=1.01,
        rollout_token_veto_threshold=0.9,
    )
    assert torch.equal(plain.weights, rejecting.weights)
    assert float(plain.weights.min()) >= math.exp(-20) * (1 - 1e-6)
    assert float(plain.weights.max()) <= math.exp(20) * (1 + 1e-6)


def test_veto_rejects_the_sample_by_the_unbounded_ratio():
    delta = torch.tensor([[0.0, -30.0], [0.0, -0.1]])
    result = correct(delta, torch.zeros(2, 2), rollout_token_veto_threshold=1e-10)
    assert result.keep.tolist() == [[False, False], [True, True]]
    values = result.metrics.compute()
    assert values["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert values["rollout_corr/rollout_is_catastrophic_token_fraction"] == 0.25


@pytest.mark.parametrize("mode", ["token_k2", "token_k3", "seq_sum_k2", "seq_mean_k3", "step_kl", "seq_kl"])
def test_measured_bounds_keep_all_of_a_few_terms(mode):
    for seed in range(50):
        draw = torch.Generator().manual_seed(seed)
        delta, kl = torch.randn(2, 5, 2, generator=draw, dtype=torch.float64)
        options = {"step_kl": kl.square(), "rollout_rs": mode, "rollout_rs_threshold": "auto"}
        assert bool(correct(delta, torch.zeros_like(delta), **options).keep.all()), seed


@pytest.mark.parametrize("name", ["DISTANCE", "FOURTH_POWER"])
def test_measured_bounds_of_ones_own_divergence(name):
    """As with `token_k2`, no clean batch of 96 normal terms has an outlier, and a term at 15 deviations is one."""
    options = {"rollout_rs": f"{__name__}:{name}", "rollout_rs_threshold": "auto"}
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        delta = 1e-3 * torch.randn(48, 2, generator=draw, dtype=torch.float64)
        assert bool(correct(delta, torch.zeros_like(delta), **options).keep.all()), seed
        delta[0, 0] = 1.5e-2
        kept = correct(delta, torch.zeros_like(delta), **options).keep
        assert not kept[0, 0]
        assert kept.sum() == 95


def test_a_bound_for_longer_log_ratios_adds_their_lengths():
    upper, slack = torch.tensor([16.0]), torch.tensor([1.0])
    assert widened(FOURTH_POWER, upper, slack).item() == pytest.approx(81.0)  # (2 + 1)^4
    assert widened(DISTANCE, upper, slack).item() == pytest.approx(17.0)
    assert widened(RS_MODES["token_k2"], upper, slack).item() == pytest.approx(25.0)
    k3 = widened(RS_MODES["token_k3"], upper, slack).item()
    assert k3 == pytest.approx(math.exp((math.log(17) ** 0.5 + math.log(2) ** 0.5) ** 2) - 1)


DISTANCE = Mode(level="step", value=lambda ratios: ratios.scaled.abs(), bounds=ABSOLUTE)
FOURTH_POWER = Mode(
    level="step",
    value=lambda ratios: ratios.scaled**4,
    bounds=Bounds(length=lambda value: value ** (1 / 4), value=lambda length: length**4),
)
