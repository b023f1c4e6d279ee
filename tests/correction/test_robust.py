"""Bands measured on a batch: against hand-computed numbers, on clean noise, and with planted outliers."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcorr.correction import RS_MODES, RolloutCorrectionConfig
from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct
from flowcorr.correction.modes import OUTLIER_Z
from flowcorr.correction.robust import nan_median, outlier_band

AUTO_MODES = tuple(mode for mode in RS_MODES if mode != "step_z")
SAMPLES = 96
# Density ratios (`sum`) of more elements would leave float64.
UNITS = [(size, scale) for size in (16, 512, 16384, 262144) for scale in ("mean", "sqrt")]
UNITS += [(16, "sum"), (512, "sum")]


def band(values, rows=None, num_rows=1, floor=0.0):
    values = torch.as_tensor(values, dtype=torch.float64)
    rows = torch.zeros_like(values).long() if rows is None else torch.as_tensor(rows)
    low, high = outlier_band(values, torch.ones_like(values), rows, num_rows, floor=floor)
    return float(low), float(high)


def gap(num_elements, *, seed, samples=SAMPLES, r=0.02):
    """Log-ratios of a random shift at two of four steps, with `r` doubling from step to step; window by sample."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.arange(samples) % 3
    indices = torch.stack([first, first + 1], dim=1)
    # The shift itself differs a little from term to term.
    r = r * 2.0**indices * (1 + 0.1 * torch.randn(samples, 2, generator=draw, dtype=torch.float64))
    noise = torch.randn(samples, 2, generator=draw, dtype=torch.float64)
    return -r.square() / 2 + r / math.sqrt(num_elements) * noise, r.square() / 2, indices


def reject(delta, step_kl, indices, mode, num_elements, **options):
    return correct(
        delta,
        torch.zeros_like(delta),
        rollout_rs=mode,
        rollout_rs_threshold="auto",
        step_kl=step_kl,
        step_indices=indices,
        num_steps=4,
        num_elements=num_elements,
        **options,
    )


# The rule -------------------------------------------------------------------------------------------------


def test_band_of_hand_computed_numbers():
    # The median is midway, 3.5; absolute deviations .5 .5 1.5 1.5 2.5 2.5 3.5 96.5, whose median is 2.
    values = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0]
    reach = 6 * (1.4826 * 2.0 + 0.25)
    assert band(values, floor=0.25) == pytest.approx((3.5 - reach, 3.5 + reach))
    # With a ninth: median 4, deviations 0 0 1 1 2 2 3 4 96.
    assert band([*values, 4.0]) == pytest.approx((4 - 6 * 1.4826 * 2, 4 + 6 * 1.4826 * 2))


def test_the_band_holds_that_of_every_row():
    first, second = [-1.0, 1.0] * 4, [9.0, 11.0] * 5
    rows = [0] * 8 + [2] * 10
    assert band(first + second, rows, 4) == pytest.approx((-6 * 1.4826, 10 + 6 * 1.4826))


def test_a_row_of_few_terms_is_left_alone():
    assert band([-3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 50.0]) == (-3.0, 50.0)
    assert band([0.0] * 8 + [7.0], [0] * 8 + [1], 2) == (0.0, 7.0)


def test_terms_that_do_not_count_are_not_seen():
    values = torch.tensor([-1.0, 1.0] * 4 + [500.0], dtype=torch.float64)
    valid = torch.tensor([1.0] * 8 + [0.0], dtype=torch.float64)
    rows = torch.zeros(9, dtype=torch.int64)
    low, high = outlier_band(values, valid, rows, 1, floor=0.0)
    assert (float(low), float(high)) == pytest.approx((-6 * 1.4826, 6 * 1.4826))
    low, high = outlier_band(values, torch.zeros_like(valid), rows, 1, floor=0.0)
    assert (float(low), float(high)) == (math.inf, -math.inf)


# In the correction ----------------------------------------------------------------------------------------


def test_thresholds_in_use_are_logged_as_they_are_written():
    draw = torch.Generator().manual_seed(0)
    delta = 1e-3 + 1e-4 * torch.randn(16, 1, generator=draw, dtype=torch.float64)
    delta[3] = 0.01
    values = correct(
        delta, torch.zeros_like(delta), rollout_rs="token_k1,token_k2", rollout_rs_threshold=["auto", 1.0]
    ).metrics.compute()
    ordered = sorted(delta.flatten().tolist())
    median = (ordered[7] + ordered[8]) / 2
    deviations = sorted(abs(value - median) for value in ordered)
    floor = 4 * 2.0**-24 * 2.0**-6  # 4 float32 ulps of the largest log-prob, .01
    reach = 6 * (1.4826 * (deviations[7] + deviations[8]) / 2 + floor)
    low, high = (values[f"rollout_corr/rollout_rs_token_k1_threshold_{end}"] for end in ("low", "high"))
    assert math.log(low) == pytest.approx(median - reach, rel=1e-6)
    assert math.log(high) == pytest.approx(median + reach, rel=1e-6)
    assert values["rollout_corr/rollout_rs_token_k1_fraction_high"] == 1 / 16
    assert not any("token_k2_threshold" in name for name in values)


@pytest.mark.parametrize(("num_elements", "scale"), UNITS)
def test_clean_noise_has_no_outliers(num_elements, scale):
    for seed in range(20):
        delta, step_kl, indices = gap(num_elements, seed=seed, samples=4 * SAMPLES)
        chain = ",".join(AUTO_MODES)
        result = reject(delta, step_kl, indices, chain, num_elements, log_ratio_scale=scale)
        assert bool(result.keep.all()), seed


@pytest.mark.parametrize(("num_elements", "scale"), UNITS)
@pytest.mark.parametrize("mode", AUTO_MODES)
def test_planted_outliers_are_found_and_nothing_else(mode, scale, num_elements):
    delta, step_kl, indices = gap(num_elements, seed=1)
    planted = torch.zeros_like(delta, dtype=torch.bool)
    planted[[5, 40, 77], [0, 1, 1]] = True
    # Beyond what the noisiest step of all reaches, which is what one band for all steps can tell.
    noisiest = 0.02 * 2**3 * (2.0 if num_elements > 512 else 1.0)
    sign = 1 if mode.endswith("k3") else -1  # with large log-ratios, k3 hardly sees the negative ones
    delta = torch.where(planted, 20 * sign * (noisiest / math.sqrt(num_elements) + noisiest**2 / 2), delta)
    step_kl = torch.where(planted, 40 * step_kl.max(), step_kl)
    result = reject(delta, step_kl, indices, mode, num_elements, log_ratio_scale=scale)
    expected = ~planted
    if mode.startswith("seq"):
        expected = expected.all(1, keepdim=True).expand_as(planted)
    assert torch.equal(result.keep, expected)


@pytest.mark.parametrize("mode", AUTO_MODES)
def test_equal_policies_are_not_rejected_for_rounding(mode):
    log_prob = -1.3 * torch.ones(64, 2)
    other = log_prob.clone()
    other[9, 0] -= 2.0**-23  # one float32 ulp
    options = {"rollout_rs": mode, "rollout_rs_threshold": "auto", "step_kl": torch.zeros(64, 2)}
    assert bool(correct(other, log_prob, num_elements=4096, **options).keep.all())
    assert bool(correct(log_prob, log_prob, **options).keep.all())


def test_masked_and_non_finite_terms_do_not_move_the_band():
    delta, step_kl, indices = gap(512, seed=3)
    clean = reject(delta[8:], step_kl[8:], indices[8:], "token_k1", 512)
    mask = torch.ones_like(delta)
    mask[:4], delta[:4], delta[4:8] = 0, 9.0, math.nan
    result = reject(delta, step_kl, indices, "token_k1", 512, mask=mask)
    assert torch.equal(result.keep[8:], clean.keep)
    assert not bool(result.keep[:8].any())
    for end in ("low", "high"):
        name = f"rollout_corr/rollout_rs_token_k1_threshold_{end}"
        assert result.metrics.compute()[name] == clean.metrics.compute()[name]


def test_auto_of_step_z_is_the_rule_itself():
    config = RolloutCorrectionConfig(rollout_rs="token_k1,step_z", rollout_rs_threshold="auto")
    band, z = config.criteria
    assert (band.auto, band.lower, band.upper) == (True, -math.inf, math.inf)
    assert (z.auto, z.upper) == (False, OUTLIER_Z)


def test_step_z_finds_the_outlier_of_its_step_index():
    generator = torch.Generator().manual_seed(5)
    indices = torch.tensor([[0, 1]]).repeat(12, 1)
    delta = torch.where(indices == 0, 1e-3, 1e-1) * torch.randn(
        12, 2, generator=generator, dtype=torch.float64
    )
    delta[7, 0] = 0.05  # ordinary for step 1, far out for step 0
    result = correct(
        delta,
        torch.zeros_like(delta),
        rollout_rs="step_z",
        rollout_rs_threshold=6.0,
        step_indices=indices,
        num_steps=3,
        num_elements=10**6,
    )
    expected = torch.ones(12, 2, dtype=torch.bool)
    expected[7, 0] = False
    assert torch.equal(result.keep, expected)
    column = delta[:, 0].tolist()
    median = statistics.median(column)
    mad = statistics.median(abs(x - median) for x in column)
    z = result.metrics.compute()["rollout_corr/rollout_rs_step_z_max"]
    floor = 4 * 2.0**-28  # 4 float32 ulps of 0.05, which is more than 0.01 / D
    assert z == pytest.approx((0.05 - median) / (1.4826 * mad + floor), rel=1e-9)


def test_step_z_needs_eight_terms_and_is_blind_to_a_shift():
    delta = torch.zeros(8, 1, dtype=torch.float64)
    delta[0] = 1.0
    options = {"rollout_rs": "step_z", "rollout_rs_threshold": 6.0}
    assert bool(correct(delta[:7], torch.zeros(7, 1), **options).keep.all())
    assert not bool(correct(delta, torch.zeros(8, 1), **options).keep[0])
    assert bool(correct(torch.full((9, 1), 0.5), torch.zeros(9, 1), **options).keep.all())


@given(
    st.lists(
        st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=5, max_size=5), min_size=1, max_size=4
    )
)
def test_a_median_is_that_of_the_values_that_are_there(rows):
    medians = nan_median(torch.tensor(rows, dtype=torch.float64)).tolist()
    for median, row in zip(medians, rows, strict=True):
        there = [value for value in row if not math.isnan(value)]
        assert median == pytest.approx(statistics.median(there) if there else math.nan, nan_ok=True)
