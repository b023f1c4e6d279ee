"""The mode by hand-made noise: when it switches, when it stays, and that a checkpoint keeps it."""

import itertools
import logging
import re

import pytest
import torch

from flowcorr.algorithm import AutoMode
from flowcorr.algorithm.auto_mode import WINDOW
from flowcorr.algorithm.noise_floor import clip_noise
from flowcorr.correction import OFF, RolloutCorrectionConfig
from flowcorr.metrics import Metrics

CLIP = 1e-3
AUTO = RolloutCorrectionConfig(bypass_mode="auto", rollout_is="sequence")


def step_of(beyond, at, terms=192, rest=0.1):
    """Metrics of a training step, `beyond` of whose terms are `at` clip ranges from 1 and the others at `rest`."""
    distance = torch.full((terms, 1), rest, dtype=torch.float64)
    distance[:beyond] = at
    return clip_noise((CLIP * distance).log1p(), None, "step", CLIP)


def modes(auto, steps):
    """Whether each step is in bypass mode."""
    result = []
    for metrics in steps:
        result.append(auto.correction.bypass_mode)
        auto.observe(metrics)
    return result


QUIET, LOUD, MIDDLE = step_of(0, 0.0), step_of(40, 1.5), step_of(40, 0.7)


@pytest.mark.parametrize("configured", [OFF, RolloutCorrectionConfig(), RolloutCorrectionConfig.pg_is()])
def test_a_mode_that_is_configured_stays(configured):
    auto = AutoMode(configured)
    assert auto.observe(LOUD).compute() == {}
    assert auto.correction is configured
    assert auto.state() == {}
    auto.restore({"bypass": torch.tensor(False)})
    assert auto.correction is configured


def test_noise_within_the_clip_range_stays_in_bypass():
    auto = AutoMode(AUTO)
    assert auto.correction == AUTO.in_mode("bypass")
    assert modes(auto, [QUIET, MIDDLE] * 20) == [True] * 40


def test_with_stale_weights_it_begins_decoupled():
    auto = AutoMode(AUTO, stale=True)
    assert auto.correction == AUTO.in_mode("decoupled")
    assert modes(auto, [MIDDLE] * 3) == [False] * 3
    assert modes(auto, [QUIET] * 40)[-1]


def test_four_of_the_first_96_terms_outside_end_bypass(caplog):
    # P(more than 3 of 96 beyond the .99 quantile) is 1.6 %, and 2.5 % are allowed; of more than 2, 7 %.
    for beyond, bypass in ((3, True), (4, False)):
        auto = AutoMode(AUTO)
        values = auto.observe(step_of(beyond, 1.5, terms=96)).compute()
        assert auto.correction == AUTO.in_mode("bypass" if bypass else "decoupled")
        assert values["rollout_corr/bypass"] == 1.0  # of the step that is done
        assert "rollout_corr/noise_quantile_high" not in values  # too few terms
    assert values["rollout_corr/noise_quantile"] == pytest.approx(1.5, rel=0.1)
    assert 1.4 < values["rollout_corr/noise_quantile_low"] < 1.5
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.findall(r"[\d.]*\d|inf", record.getMessage().partition(" clip ranges (")[2]) == [
        *("95", "1.41", "inf", "96", "1", "16"),  # interval, terms, training steps
        "1",
    ]
    assert "1.54 clip" in record.getMessage()
    assert "auto_enter=1: " in record.getMessage()


def test_it_comes_back_late_and_does_not_flap(caplog):
    auto = AutoMode(AUTO)
    assert modes(auto, [LOUD]) == [True]
    assert modes(auto, [LOUD] * 3 + [MIDDLE] * 60) == [False] * 63  # 4 in 10 terms at .7: above auto_leave
    # The window holds the steps at .7 until 15 quiet ones follow; 40 of 3072 terms are still too many, none is few.
    assert modes(auto, [QUIET] * WINDOW) == [False] * WINDOW
    assert modes(auto, [MIDDLE] * 60) == [True] * 60  # and .7 is below auto_enter
    assert [re.findall(r"auto_\w+=[\d.]*\d|decoupled|bypass", text) for text in caplog.messages] == [
        ["auto_enter=1", "decoupled"],
        ["auto_leave=0.5", "bypass"],
    ]
    assert auto.observe(QUIET).compute()["rollout_corr/bypass"] == 1.0


def test_the_thresholds_are_the_configured_ones():
    config = RolloutCorrectionConfig(bypass_mode="auto", auto_enter=0.5, auto_leave=0.25)
    assert modes(AutoMode(config), [MIDDLE, MIDDLE]) == [True, False]
    config = RolloutCorrectionConfig(bypass_mode="auto", auto_enter=2.0)
    assert modes(AutoMode(config), [LOUD] * 30) == [True] * 30


def test_chance_alone_hardly_switches():
    """Noise whose .99 quantile is 3/4 of the clip range: a normal law, 96 terms a step, 100 runs of 30 steps."""
    draw = torch.Generator().manual_seed(0)
    scale = 0.75 * CLIP / 2.575829  # of which the two-sided .99 quantile is .75 clip ranges
    switched = 0
    for _ in range(100):
        auto = AutoMode(AUTO)
        for _ in range(30):
            noise = scale * torch.randn(96, 1, generator=draw, dtype=torch.float64)
            auto.observe(clip_noise(noise, None, "step", CLIP))
        switched += not auto.correction.bypass_mode
    # P(|z| > 2.576 / .75) = 5.9e-4: for the first steps to have enough terms outside is the only likely way.
    assert switched <= 3


def test_nothing_measured_decides_nothing():
    auto = AutoMode(AUTO)
    values = auto.observe(step_of(0, 0.0, terms=0)).compute()
    assert values == {"rollout_corr/bypass": 1.0, "rollout_corr/noise_quantile_low": 0.0}
    assert auto.correction.bypass_mode


@pytest.mark.parametrize("cut", [0, 1, 10, 30])
def test_a_checkpoint_keeps_mode_and_window(cut):
    quiet_then_loud = [step_of(place % 3, 1.5) for place in range(8)] + [LOUD] * 3
    steps = quiet_then_loud + [QUIET] * 24 + [MIDDLE, LOUD] * 8
    whole, first, resumed = AutoMode(AUTO), AutoMode(AUTO), AutoMode(AUTO)
    expected = [(whole.observe(metrics).compute(), whole.correction) for metrics in steps]
    in_bypass = [correction.bypass_mode for _, correction in expected]
    assert sum(one != other for one, other in itertools.pairwise(in_bypass)) == 3
    for metrics in steps[:cut]:
        first.observe(metrics)
    resumed.restore({name: value.clone() for name, value in first.state().items()})
    assert resumed.correction == first.correction
    again = [(resumed.observe(metrics).compute(), resumed.correction) for metrics in steps[cut:]]
    for (values, correction), (expected_values, expected_correction) in zip(
        again, expected[cut:], strict=True
    ):
        assert correction == expected_correction
        assert values == pytest.approx(expected_values, rel=0, abs=0, nan_ok=True)


def test_a_checkpoint_without_auto_leaves_the_start():
    auto = AutoMode(AUTO)
    auto.restore({})
    assert auto.correction == AUTO.in_mode("bypass")


def test_metrics_without_noise_are_a_mistake():
    with pytest.raises(KeyError, match="clip_noise_counts"):
        AutoMode(AUTO).observe(Metrics())
