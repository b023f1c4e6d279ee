"""The gap beside the clip range of the loss."""

import math
from dataclasses import replace

import pytest
import torch
from instruments.gaps import normal_gap

from flowcorr.config import Config
from flowcorr.health.setting import Setting
from flowcorr.instruments.gap_table import Gap, clip_needed, step_table

SETTING = Setting.of(Config())


def under(terms, **actor):
    return Gap.of(terms, replace(SETTING, actor=replace(SETTING.actor, **actor)))


@pytest.mark.parametrize(
    ("actor", "expected"),
    [
        ({}, [[0.2, 0.1]]),
        ({"loss_mode": "grpo_guard"}, [[0.15, 0.1]]),
        ({"ratio_level": "trajectory_mean"}, [[0.05, 0.05]]),
        ({"ratio_level": "trajectory_sum"}, [[0.1, 0.1]]),
    ],
)
def test_distance_is_of_the_ratio_that_the_loss_uses(actor, expected):
    terms = replace(
        normal_gap(0.1, samples=1),
        old_log_prob=torch.tensor([[0.2, -0.1]], dtype=torch.float64),
        old_rollout_kl=torch.tensor([[0.1, 0.3]], dtype=torch.float64),
        std=torch.full((1, 2), 0.5),
    )
    sign = torch.tensor([[1.0, 1.0 if actor else -1.0]], dtype=torch.float64)
    log_ratio = sign * torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(under(terms, **actor).distance, log_ratio.expm1().abs())


def test_terms_of_two_losses_are_each_judged_by_their_own_range():
    terms = normal_gap(0.1, samples=8)
    wide, tight, free = (
        under(terms, **actor)
        for actor in ({"clip_ratio": 0.5}, {"clip_ratio": 1e-9}, {"loss_mode": "flow_dppo"})
    )
    assert (wide.outside(), tight.outside(), free.outside()) == (0.0, 1.0, None)
    assert Gap.concatenate([wide, tight]).outside() == 0.5
    assert Gap.concatenate([free, tight]).outside() == 1.0


def test_clip_range_is_four_times_the_noise():
    assert clip_needed(torch.linspace(0, 1, 101, dtype=torch.float64)) == pytest.approx(4 * 0.99)


def test_a_row_is_of_the_terms_of_its_step():
    terms = normal_gap(0.1, samples=64)
    terms = replace(terms, sigma=torch.tensor([[0.9, math.nan]]).expand(64, 2))
    rows = step_table(under(terms, clip_ratio=[1e-2, 1e-3])).records()
    assert [row["sigma"] for row in rows] == [pytest.approx(0.9), None]
    for place, row in enumerate(rows):
        delta = terms.old_log_prob[:, place]
        distance = delta.expm1().abs()
        assert (row["step_index"], row["num_terms"]) == (place, 64)
        assert row["mean_delta"] == pytest.approx(float(delta.mean()))
        assert row["abs_delta_90"] == pytest.approx(float(delta.abs().quantile(0.9)))
        assert row["exact_kl"] == pytest.approx(0.1**2 / 2)
        assert row["outside_clip"] == float((distance > [1e-2, 1e-3][place]).double().mean())
        assert row["clip_needed"] == pytest.approx(4 * float(distance.quantile(0.99)))
