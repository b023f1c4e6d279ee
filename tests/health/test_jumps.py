"""A gap that leaves its own spread is told, at any size; one that grows or varies as before is not."""

import math

import pytest
import torch

from flowcorr.health.jumps import EARLIER, JumpDetector
from flowcorr.health.rule import Units
from flowcorr.health.rules import HealthMonitor, examine_run

GAP = "rollout_corr/logprob_abs_diff_mean"


def records(values, metric=GAP, **others):
    return [{"step": step, metric: value, **others} for step, value in enumerate(values, start=1)]


def gaps(count, *, level=3e-4, spread=0.15, seed=0):
    noise = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return (level * (spread * noise).exp()).tolist()


def told(values, cause="jump", **kwargs):
    """The steps at which a jump or a rise is told."""
    monitor = HealthMonitor(Units())
    return [
        record["step"]
        for record in records(values, **kwargs)
        if any(finding.cause == cause for finding in monitor.update(record))
    ]


def test_a_gap_that_jumps_is_told_each_time():
    values = gaps(20)
    for step in (12, 15, 16):
        values[step - 1] *= 30
    assert told(values) == [12, 15, 16]
    (finding,) = [found for found in examine_run(records(values), Units()) if found.cause == "jump"]
    assert (finding.numbers["steps_broken"], finding.numbers["metric"]) == (3, GAP)
    assert finding.numbers["limit"] < finding.numbers["value"]
    assert finding.numbers["usual"] < 1e-3


def test_six_steps_are_enough():
    values = gaps(8)
    values[6:] = [10 * value for value in values[6:]]
    assert told(values) == [7, 8]


@pytest.mark.parametrize("metric", ["rollout_corr/replay/window", "rollout_corr/step_3/logprob_abs_diff"])
def test_other_measures_of_the_gap_are_watched_too(metric):
    values = gaps(10, level=0.03, spread=0.05)
    values[-1] *= 4
    assert told(values, metric=metric) == [10]


def test_other_metrics_may_jump():
    assert told([*gaps(10), 1.0], metric="actor/grad_norm") == []


@pytest.mark.parametrize("seed", range(20))
def test_chance_and_learning_are_no_jumps(seed):
    growing = [value * math.exp(step / 10) for step, value in enumerate(gaps(60, seed=seed))]
    for cause in ("jump", "rise"):
        assert told(gaps(100, spread=0.3, seed=seed), cause) == []
        assert told(growing, cause) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_gap_that_rises_by_less_than_a_jump_is_told_once_within_four_steps(seed):
    values = gaps(40, seed=seed)
    values[24:] = [3 * value for value in values[24:]]
    assert told(values) == []
    (step,) = told(values, "rise")
    assert 27 <= step <= 28
    (finding,) = examine_run(records(values), Units())
    assert (finding.cause, finding.level, finding.fault) == ("rise", "warning", False)
    assert finding.numbers["usual"] < finding.numbers["limit"] < finding.numbers["value"]


def test_a_rise_of_four_steps_needs_sixteen_before_it():
    values = gaps(30)
    values[14:] = [3 * value for value in values[14:]]
    assert told(values, "rise") == [20]


def test_one_jump_is_no_rise():
    values = gaps(30)
    values[20] *= 1000
    assert told(values) == [21]
    assert told(values, "rise") == []


def test_rounding_of_float32_is_no_jump():
    assert told([0.0] * 10 + [9e-7]) == []
    assert told([0.0] * 10 + [1e-5]) == [11]


def test_steps_are_compared_with_those_of_the_same_age_of_weights():
    monitor, jumps = HealthMonitor(Units()), []
    for step, value in enumerate(gaps(60), start=1):
        age = float(step % 10 == 0)
        record = {"step": step, GAP: value * (20 if age else 1), "rollout/staleness_max": age}
        jumps += [finding for finding in monitor.update(record) if finding.cause == "jump"]
    assert jumps == []


def test_a_new_level_becomes_usual():
    values = gaps(3 * EARLIER)
    values[20:] = [10 * value for value in values[20:]]
    steps = told(values)
    assert steps[0] == 21
    assert steps[-1] < 21 + EARLIER


def test_a_resumed_run_knows_the_steps_before():
    values = gaps(12)
    resumed = HealthMonitor(Units(), earlier=records(values))
    assert [finding.cause for finding in resumed.update({"step": 13, GAP: 10 * values[0]})] == ["jump"]


def test_the_measure_that_jumps_furthest_is_told():
    detector = JumpDetector()
    for value in gaps(10):
        detector.update({GAP: value, "rollout_corr/replay/window": 100 * value})
    (jump,) = detector.update({GAP: 1e-2, "rollout_corr/replay/window": 1e2})
    assert jump.finding.numbers["metric"] == "rollout_corr/replay/window"
