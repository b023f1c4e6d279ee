"""The tables of an audit against their definitions."""

import math
from dataclasses import replace

import pytest
import torch
from instruments.gaps import D, normal_gap
from instruments.html_pages import drawn

from flowcorr.algorithm.bands import WARM_UP
from flowcorr.config import Config
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import PRESETS
from flowcorr.health.setting import Setting
from flowcorr.instruments.audit.measure import as_steps
from flowcorr.instruments.audit.presets import compare
from flowcorr.instruments.audit.tables import exact_ess, gap_chart, joint_nats, outliers, scale_table
from flowcorr.instruments.faults import delta
from flowcorr.instruments.gap_table import Gap, step_table
from flowcorr.records import Terms


def worth_of(gap):
    """The rows of the table of scales, by scale and level."""
    return {(row["scale"], row["level"]): row for row in scale_table(gap).records()}


def test_scales_agree_with_the_exact_kl():
    gap = normal_gap(0.01)
    joint = joint_nats(gap)
    assert joint == pytest.approx(2 * D * 0.01**2 / 2)
    worth = worth_of(gap)
    assert worth["sum", "sequence"]["expected_ess"] == pytest.approx(math.exp(-2 * D * 0.01**2))
    assert worth["sum", "sequence"]["expected_ess"] == exact_ess(gap)
    assert worth["sum", "token"]["expected_ess"] == pytest.approx(math.exp(-D * 0.01**2))
    assert worth["sqrt", "sequence"]["expected_ess"] == pytest.approx(math.exp(-2 * 0.01**2))
    for row in worth.values():
        assert row["ess"] == pytest.approx(row["expected_ess"], rel=0.02)
    # A density ratio's chi-squared is exp(x) - 1; `mean` makes of it next to nothing.
    assert worth["sum", "sequence"]["chi2"] == pytest.approx(math.expm1(2 * D * 0.01**2), rel=0.15)
    assert abs(worth["mean", "sequence"]["chi2"]) < 1e-3


def test_a_share_is_expected_of_all_gaps_not_of_the_mean_one():
    """A third of the samples with nine times the KL: few weights carry all, though the mean gap is moderate."""
    small, large = normal_gap(0.02, samples=2 * 200_000), normal_gap(0.06, samples=200_000)
    gap, share = Terms.concatenate([small, large]), {}
    for (scale, level), row in worth_of(gap).items():
        share[scale, level] = row["expected_ess"]
        if scale != "sum":  # whose measured share has too heavy tails
            assert row["ess"] == pytest.approx(row["expected_ess"], rel=1e-3)
    squares = [D * 0.02**2, D * 0.06**2]
    exact = 3 / (2 * math.exp(squares[0]) + math.exp(squares[1]))
    assert share["sum", "token"] == pytest.approx(exact)
    assert share["sum", "sequence"] == pytest.approx(
        3 / (2 * math.exp(2 * squares[0]) + math.exp(2 * squares[1]))
    )
    assert share["sum", "sequence"] < math.exp(-2 * joint_nats(gap)) / 3


def test_weights_that_overflow_have_no_chi2():
    gap = normal_gap(0.01)
    gap = replace(
        gap,
        old_log_prob=torch.full((4096, 2), 1.0),
        old_rollout_kl=torch.full_like(gap.old_rollout_kl, 1e3),
    )
    last = worth_of(gap)["sum", "sequence"]
    assert (last["chi2"], last["ess"], last["expected_ess"]) == (None, pytest.approx(1.0), 0.0)


def test_presets_reject_what_lies_beyond_their_bands():
    gap = normal_gap(0.03)
    found = outcomes(gap)
    assert found.keys() == PRESETS.keys()
    log_ratio = delta(gap)
    band = (math.log(0.999), math.log(1.001))
    outside = (log_ratio.mean(1) < band[0]) | (log_ratio.mean(1) > band[1])
    assert found["decoupled_geo_rs"]["rejected_samples"] == float(outside.double().mean()) > 0
    alone = (log_ratio < band[0]) | (log_ratio > band[1])
    assert found["bypass_ppo_clip_geo_rs"]["rejected_terms"] == float(alone.double().mean())
    assert found["bypass_ppo_clip_geo_rs"]["weight"] is None
    assert found["decoupled_seq_is"]["ess"] == pytest.approx(1, abs=1e-4)
    assert found["disabled"]["rejected_samples"] == 0


def test_outliers_stand_out_of_the_noise():
    gap = normal_gap(0.03)
    share, band = outliers(gap)
    assert share == 0
    assert band > float(delta(gap).expm1().abs().max())
    gap.old_log_prob[:40, 0] = 0.05
    share, spared = outliers(gap)
    assert share == pytest.approx(40 / delta(gap).numel())
    assert spared == pytest.approx(band, rel=0.05)


def test_measured_bands_are_those_after_training_steps_like_this_one():
    gap = normal_gap(0.03)
    assert outcomes(gap)["bypass_ppo_clip_auto_rs"]["rejected_terms"] == 0
    gap.old_log_prob[:400, 0] = 0.1
    share = outcomes(gap)["bypass_ppo_clip_auto_rs"]["rejected_terms"]
    assert share == pytest.approx(400 / delta(gap).numel())


def outcomes(gap):
    """What each preset makes of a gap."""
    setting = Setting.of(Config())
    found = compare([as_steps(Gap.of(gap, setting))], setting.correction, warm_up=WARM_UP)
    return {one.name: one.numbers for one in found}


def test_the_chart_shows_the_gap_beside_the_clip_range():
    gap = normal_gap(0.03)
    steps = step_table(Gap.of(gap, replace(Setting.of(Config()), actor=ActorConfig(clip_ratio=1e-3))))
    axes = drawn(gap_chart(steps, 1e-3))
    assert axes.get_yscale() == "log"
    lines = {line.get_label().strip(): list(line.get_ydata()) for line in axes.lines}
    for mark, column in (("90%", "abs_delta_90"), ("needed", "clip_needed")):
        assert lines[mark] == [row[column] for row in steps.records()]
    assert lines["clip"] == [1e-3, 1e-3]
    (band,) = axes.collections
    edges = {float(height) for height in band.get_paths()[0].vertices[:, 1]}
    assert edges == {row[f"abs_delta_{level}"] for row in steps.records() for level in (50, 99)}
