"""Rejection modes, the veto, and thresholds that are measured."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr.correction import ABSOLUTE, RS_MODES, SQUARE, Bounds, Mode
from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct
from flowcorr.correction.rejection import widened
from flowcorr.errors import BatchError, ConfigError

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


def test_asymmetric_k1_bands_bound_the_ratio_and_not_its_reciprocal():
    ratio = torch.tensor([[0.6], [1.7], [2.5]])
    result = correct(ratio.log(), torch.zeros(3, 1), rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    assert result.keep.flatten().tolist() == [True, True, False]
    skewed = correct(ratio.log(), torch.zeros(3, 1), rollout_rs="token_k1", rollout_rs_threshold="0.55_3.0")
    # verl holds k1 = -log ratio against log(0.55)..log(3), so it would keep ratios in 0.33..1.82 only.
    assert skewed.keep.flatten().tolist() == [True, True, True]
    values = skewed.metrics.compute()
    assert values["rollout_corr/rollout_rs_token_k1_max"] == pytest.approx(-math.log(0.6), rel=1e-6)


def test_veto_rejects_the_sample_by_the_unbounded_ratio():
    delta = torch.tensor([[0.0, -30.0], [0.0, -0.1]])
    result = correct(delta, torch.zeros(2, 2), rollout_token_veto_threshold=1e-10)
    assert result.keep.tolist() == [[False, False], [True, True]]
    values = result.metrics.compute()
    assert values["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert values["rollout_corr/rollout_is_catastrophic_token_fraction"] == 0.25


def test_exact_kl_modes_bound_the_step_and_the_window():
    kl = torch.tensor([[1e-4, 3e-4], [1e-4, 1e-4]])
    zero = torch.zeros(2, 2)
    step = correct(zero, zero, step_kl=kl, rollout_rs="step_kl", rollout_rs_threshold=2e-4)
    assert step.keep.tolist() == [[True, False], [True, True]]
    window = correct(zero, zero, step_kl=kl, rollout_rs="seq_kl", rollout_rs_threshold=3e-4)
    assert window.keep.tolist() == [[False, False], [True, True]]
    assert step.metrics.compute()["rollout_corr/exact_kl"] == pytest.approx(1.5e-4)
    with pytest.raises(BatchError, match="step_kl"):
        correct(zero, zero, rollout_rs="seq_kl", rollout_rs_threshold=1e-3)


@pytest.mark.parametrize("mode", ["token_k3", "seq_sum_k3", "seq_mean_k3", "seq_max_k3"])
@pytest.mark.parametrize("delta", [10_000.0, -10_000.0])
def test_the_worst_terms_have_the_largest_divergence(mode, delta):
    options = {"log_ratio_scale": "sum", "num_elements": 65536}
    target = torch.tensor([[delta], [1e-7]], dtype=torch.float64)
    result = correct(target, torch.zeros(2, 1), rollout_rs=mode, rollout_rs_threshold=0.01, **options)
    assert result.keep.tolist() == [[False], [True]]
    values = result.metrics.compute()
    assert values[f"rollout_corr/rollout_rs_{mode}_min"] >= 0.0
    assert values[f"rollout_corr/rollout_rs_{mode}_max"] > 1e8


@pytest.mark.parametrize("mode", ["token_k2", "token_k3", "seq_sum_k2", "seq_mean_k3", "step_kl", "seq_kl"])
def test_measured_bounds_keep_all_of_a_few_terms(mode):
    for seed in range(50):
        draw = torch.Generator().manual_seed(seed)
        delta, kl = torch.randn(2, 5, 2, generator=draw, dtype=torch.float64)
        options = {"step_kl": kl.square(), "rollout_rs": mode, "rollout_rs_threshold": "auto"}
        assert bool(correct(delta, torch.zeros_like(delta), **options).keep.all()), seed


def test_a_mode_of_ones_own():
    # The sum of the steps but the first, as an upper bound.
    options = {"rollout_rs": f"{__name__}:LATER_STEPS,token_k1", "rollout_rs_threshold": "0.5,0.1_10"}
    delta = torch.tensor([[0.9, 0.1, 0.3], [0.1, 0.3, 0.3]])
    result = correct(delta, torch.zeros_like(delta), **options)
    assert result.keep.tolist() == [[True] * 3, [False] * 3]
    values = result.metrics.compute()
    assert values["rollout_corr/rollout_rs_LATER_STEPS_max"] == pytest.approx(0.6)
    assert values["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 0.0
    with pytest.raises(ConfigError, match=r"is of type list; name a flowcorr\.correction\.Mode"):
        correct(delta, delta, rollout_rs=f"{__name__}:MODES", rollout_rs_threshold=1.0)


def test_a_mode_of_ones_own_may_divide_by_a_samples_steps():
    delta, mask = torch.tensor([[0.9, 0.1], [0.1, 0.3]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    options = {"rollout_rs": f"{__name__}:MEAN_SQUARE", "rollout_rs_threshold": 1.0}
    values = correct(delta, torch.zeros_like(delta), mask, **options).metrics.compute()
    assert values["rollout_corr/rollout_rs_MEAN_SQUARE_mean"] == pytest.approx(0.05)


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
MEAN_SQUARE = Mode(
    level="sample", value=lambda ratios: ratios.delta.square().sum(1) / ratios.valid.sum(1), bounds=SQUARE
)
LATER_STEPS = Mode(
    level="sample", value=lambda ratios: ratios.scaled.sum(1) - ratios.scaled[:, 0], bounds=ABSOLUTE
)
