"""Reward hacking: images far from their start while the reward rises."""

import pytest

from flowcorr.health.image_drift import DriftDetector, largest_drift
from flowcorr.health.rule import Units
from flowcorr.health.rules import HealthMonitor, examine_run

START = {
    "reward/mean": 0.5,
    "reward/image/dark": 0.45,
    "reward/image/sharpness": 0.08,
    "reward/image/motion": 0.04,
    "reward/image/diversity": 0.05,
}


def record(step, reward, **statistics):
    return {"step": step, "reward/mean": reward, **{f"reward/image/{k}": v for k, v in statistics.items()}}


def judged(metrics):
    """The rules that a step breaks after one with the values of `START`."""
    detector = DriftDetector()
    assert detector.update(START) == []
    return detector.update(metrics)


@pytest.mark.parametrize(
    ("statistics", "metric", "size"),
    [
        ({"dark": 0.93, "sharpness": 0.08}, "dark", 0.48 / 0.25),
        ({"dark": 0.2, "sharpness": 0.08}, "dark", 1.0),
        ({"dark": 0.45, "sharpness": 0.16}, "sharpness", 1.0),
        ({"dark": 0.45, "sharpness": 0.02}, "sharpness", 2.0),
        ({"dark": 0.45, "motion": 0.01}, "motion", 2.0),
        ({"dark": 0.45, "diversity": 0.0125}, "diversity", 1.0),
    ],
)
def test_shares_change_by_differences_and_others_by_factors(statistics, metric, size):
    drift = largest_drift(record(9, 0.5, **statistics), START)
    assert drift.metric == f"reward/image/{metric}"
    assert drift.size == pytest.approx(size, rel=1e-3)


def test_a_blank_image_is_far_from_any_start():
    assert largest_drift(record(9, 0.5, sharpness=0.0), START).size > 10
    assert largest_drift({"reward/mean": 1.0}, START) is None


@pytest.mark.parametrize(
    ("reward", "dark", "broken"), [(0.9, 0.93, True), (0.4, 0.93, False), (0.9, 0.6, False)]
)
def test_images_are_judged_while_the_reward_rises(reward, dark, broken):
    found = judged(record(9, reward, dark=dark))
    assert [one.finding.cause for one in found] == ["reward_hacking"] * broken
    if broken:
        numbers = found[0].finding.numbers
        assert (numbers["reward then"], numbers["reward now"]) == (0.5, 0.9)
        assert (numbers["at the start"], numbers["now"]) == (0.45, 0.93)


def test_a_monitor_tells_it_once_after_three_steps_also_in_a_resumed_run():
    run = [record(step, 0.5 + 0.1 * step, dark=0.4 + 0.1 * step) for step in range(8)]
    monitor = HealthMonitor(Units())
    told = [index for index, metrics in enumerate(run) if monitor.update(metrics)]
    assert told == [5]  # beyond the limit at steps 3, 4 and 5
    resumed = HealthMonitor(Units(), earlier=run[:1])
    assert [index for index, metrics in enumerate(run[4:], start=4) if resumed.update(metrics)] == [6]
    (finding,) = examine_run(run, Units())
    assert (finding.cause, finding.numbers["step"], finding.numbers["steps_broken"]) == (
        "reward_hacking",
        7,
        5,
    )


def test_scores_that_a_reward_names_like_statistics_tell_nothing():
    scores = {"reward/image/aesthetic": -0.3, "reward/image/dark": 0.45}
    drift = largest_drift(scores, {"reward/image/aesthetic": 5.0, "reward/image/dark": 0.45})
    assert (drift.metric, drift.size) == ("reward/image/dark", 0)
    assert largest_drift({"reward/image/dark": -1.0}, START) is None


def test_a_policy_that_freezes_its_videos_shows():
    (found,) = judged(record(9, 0.9, dark=0.45, motion=0.001))
    numbers = found.finding.numbers
    assert numbers["metric"] == "reward/image/motion"
    assert (numbers["at the start"], numbers["now"]) == (0.04, 0.001)
