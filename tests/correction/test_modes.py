"""Rejection modes: the value that each bounds, against hand-computed numbers, and modes of one's own."""

from __future__ import annotations

import math

import pytest
import torch

from flowcorr.correction import ABSOLUTE, SQUARE, Mode
from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct
from flowcorr.errors import BatchError, ConfigError


def test_asymmetric_k1_bands_bound_the_ratio_and_not_its_reciprocal():
    ratio = torch.tensor([[0.6], [1.7], [2.5]])
    result = correct(ratio.log(), torch.zeros(3, 1), rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    assert result.keep.flatten().tolist() == [True, True, False]
    skewed = correct(ratio.log(), torch.zeros(3, 1), rollout_rs="token_k1", rollout_rs_threshold="0.55_3.0")
    # verl holds k1 = -log ratio against log(0.55)..log(3), so it would keep ratios in 0.33..1.82 only.
    assert skewed.keep.flatten().tolist() == [True, True, True]
    values = skewed.metrics.compute()
    assert values["rollout_corr/rollout_rs_token_k1_max"] == pytest.approx(-math.log(0.6), rel=1e-6)


def test_exact_kl_modes_bound_the_step_and_the_window():
    kl = torch.tensor([[1e-4, 3e-4], [1e-4, 1e-4]])
    zero = torch.zeros(2, 2)
    step = correct(zero, zero, step_kl=kl, rollout_rs="step_kl", rollout_rs_threshold=2e-4)
    assert step.keep.tolist() == [[True, False], [True, True]]
    window = correct(zero, zero, step_kl=kl, rollout_rs="seq_kl", rollout_rs_threshold=3e-4)
    assert window.keep.tolist() == [[False, False], [True, True]]
    assert step.metrics.compute()["rollout_corr/exact_kl"] == pytest.approx(1.5e-4)
    with pytest.raises(BatchError, match="rollout_rs='seq_kl' .*step_kl;"):
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


def test_a_mode_of_ones_own():
    # The sum of the steps but the first, as an upper bound.
    options = {"rollout_rs": f"{__name__}:LATER_STEPS,token_k1", "rollout_rs_threshold": "0.5,0.1_10"}
    delta = torch.tensor([[0.9, 0.1, 0.3], [0.1, 0.3, 0.3]])
    result = correct(delta, torch.zeros_like(delta), **options)
    assert result.keep.tolist() == [[True] * 3, [False] * 3]
    values = result.metrics.compute()
    assert values["rollout_corr/rollout_rs_LATER_STEPS_max"] == pytest.approx(0.6)
    assert values["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 0.0
    with pytest.raises(ConfigError, match=r"rollout_rs=.*:NO_MODE' .* list; .*flowcorr\.correction\.Mode"):
        correct(delta, delta, rollout_rs=f"{__name__}:NO_MODE", rollout_rs_threshold=1.0)


def test_a_mode_of_ones_own_may_divide_by_a_samples_steps():
    delta, mask = torch.tensor([[0.9, 0.1], [0.1, 0.3]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    options = {"rollout_rs": f"{__name__}:MEAN_SQUARE", "rollout_rs_threshold": 1.0}
    values = correct(delta, torch.zeros_like(delta), mask, **options).metrics.compute()
    assert values["rollout_corr/rollout_rs_MEAN_SQUARE_mean"] == pytest.approx(0.05)


MEAN_SQUARE = Mode(
    level="sample", value=lambda ratios: ratios.delta.square().sum(1) / ratios.valid.sum(1), bounds=SQUARE
)
LATER_STEPS = Mode(
    level="sample", value=lambda ratios: ratios.scaled.sum(1) - ratios.scaled[:, 0], bounds=ABSOLUTE
)
NO_MODE = ["token_k1"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"level": "token"}, r"level='token'\): .*'step', 'sample'"),
        ({"needs": "kl"}, r"needs='kl'\): .*'step_kl', 'z', None"),
        ({"bounds": (0.5, 2.0)}, r"bounds=\(0\.5, 2\.0\)\): .*RATIO.*rollout_rs_threshold"),
        ({"value": 3}, r"value=3\): .*LogRatios"),
    ],
)
def test_a_field_of_another_kind_is_refused_where_the_mode_is_written(fields, named):
    given = {"level": "step", "value": lambda ratios: ratios.delta, "bounds": SQUARE}
    with pytest.raises(ConfigError, match=rf"Mode\({named}"):
        Mode(**given | fields)


OF_STEPS_FOR_SAMPLES = Mode(level="sample", value=lambda ratios: ratios.scaled.abs(), bounds=ABSOLUTE)
A_NUMBER = Mode(level="step", value=lambda ratios: 1.0, bounds=ABSOLUTE)


@pytest.mark.parametrize("threshold", [0.5, "auto"])
@pytest.mark.parametrize(
    ("name", "shapes"),
    [("OF_STEPS_FOR_SAMPLES", r".*\[9, 2\] .*\[9\]"), ("A_NUMBER", r".*float .*\[9, 2\]")],
)
def test_a_value_of_another_shape_names_the_mode(name, shapes, threshold):
    delta = torch.zeros(9, 2)
    with pytest.raises(ConfigError, match=f"rollout_rs='{name}': {shapes}"):
        correct(delta, delta, rollout_rs=f"{__name__}:{name}", rollout_rs_threshold=threshold)
