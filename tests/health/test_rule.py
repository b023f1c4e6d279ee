"""Limits follow from the settings of a run, and a range of one's own takes the place of a row's."""

import math
from dataclasses import replace

import pytest
import torch

from flowcorr.health import Metric, Rule
from flowcorr.health.metric import over
from flowcorr.health.rule import Units
from flowcorr.health.table import METRICS, find_metric, rule_of

CAP = "rollout_corr/rollout_is_raw_max"


def limits(metric, units):
    return rule_of(metric, METRICS).limits(units)


def test_a_metric_without_a_rule_has_no_limits():
    assert rule_of("actor/lr", METRICS) is None
    assert Rule().limits(Units()) == (-math.inf, math.inf)


def test_the_rule_of_a_metric_of_the_whole_update_is_that_of_the_batch():
    name = "rollout_corr/rejected_ratio"
    assert rule_of(f"actor/{name}", METRICS) is rule_of(name, METRICS)
    assert (limits(name, Units()), rule_of(name, METRICS).serious) == ((-math.inf, 0.05), 0.1)


def test_weights_are_judged_by_the_cap_of_the_run():
    assert limits(CAP, Units()) == (-math.inf, math.inf)
    assert limits(CAP, Units(cap=2.0)) == (-math.inf, 2.0)


def test_a_range_of_ones_own_takes_the_place_of_the_row_s():
    rule = over(find_metric(CAP), Metric(name=CAP, rule=Rule(high=5.0))).rule
    assert (rule.name, rule.limits(Units(cap=2.0)), rule.patience) == ("cap", (-math.inf, 5.0), 1)
    (noted, told) = (rule.judge({CAP: 6.0}, Units(weighted=weighted)) for weighted in (False, True))
    assert (noted.finding.level, told.finding.level) == ("note", "warning")


def test_more_terms_judge_the_noise_more_closely():
    name = "rollout/noise_std"
    few, many = (limits(name, Units(num_elements=512, num_terms=count)) for count in (1, 100))
    assert few[0] < many[0] < 1 < many[1] < few[1]
    assert 1 - few[0] == pytest.approx(10 * (1 - many[0]))
    assert limits(name, Units()) == (-math.inf, math.inf)


@pytest.mark.parametrize("gap", [0.01, 1.0, 30.0])
def test_the_gap_of_step_means_is_bounded_by_their_log_ratios(gap):
    """`delta = -r^2 / 2 + r z / sqrt(D)` for normal `z`, in nats a latent element after division by `D`."""
    elements = 512
    z = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    delta = -(gap**2) / 2 + gap * z / math.sqrt(elements)
    metrics = {"rollout_corr/logprob_abs_diff_mean": float(delta.abs().mean())}
    units = Units(num_elements=elements)
    assert units.of_step(metrics).mean_gap >= 0.99 * gap
    assert Units().of_step(metrics).mean_gap == units.of_step({}).mean_gap == math.inf


def test_a_gap_of_the_largest_numbers_bounds_no_noise():
    assert limits("rollout/noise_tails", Units(num_elements=512, mean_gap=1e150))[1] == math.inf


def test_the_worst_break_is_the_most_serious_one_and_then_the_farthest():
    rule = Rule(name="share", metric="share", high=0.1, serious=1.0)
    mild, far, serious = (rule.judge({"share": value}, Units()) for value in (0.2, 0.9, 1.01))
    assert sorted((serious, far, mild), key=lambda broken: broken.badness) == [mild, far, serious]
    assert replace(mild, part="worker 1").key != mild.key
