from pathlib import Path

import pytest

from flowcorr.config import load
from flowcorr.health.setting import Setting
from flowcorr.instruments.report.learning import learning_of
from flowcorr.instruments.report.runs import Run


def run_of(*records):
    config = load("tiny_ocr_lora", ["data.num_heldout=100000"])  # at most; the recipe has fewer
    return Run(
        folder=Path("a"),
        setting=Setting.of(config),
        config=config,
        settings={},
        records=records,
        ending="",
        name="a",
    )


def evaluated(step, reward, std=0.4, images=100):
    return {"step": step, "eval/reward": reward, "eval/reward_std": std, "eval/scored_images": images}


# The error of a difference of two means of 100 with std .4 is .4 * sqrt(2) / 10 = .057.
@pytest.mark.parametrize(
    ("last", "change"),
    [(0.62, "rose"), (0.61, "did not move"), (0.5, "did not move"), (0.39, "did not move"), (0.38, "fell")],
)
def test_a_change_is_one_beyond_two_standard_errors(last, change):
    told, found = learning_of(run_of(evaluated(0, 0.5), evaluated(10, 0.9), evaluated(20, last)))
    assert told == found.numbers["change"] == change
    assert [found.numbers[name] for name in ("from", "to", "at steps")] == [0.5, last, [0, 20]]
    assert found.numbers["standard error"] == pytest.approx(0.057, abs=5e-4)


def test_the_error_is_of_the_images_that_have_a_reward():
    _, found = learning_of(run_of(evaluated(0, 0.5, images=50), evaluated(20, 0.61, images=50)))
    assert found.numbers["standard error"] == pytest.approx(0.08)  # .057 sqrt(2)


def test_a_score_that_was_lost_again_is_told():
    _, found = learning_of(run_of(evaluated(0, 0.5), evaluated(10, 0.9), evaluated(20, 0.7)))
    assert (found.numbers["best"], found.numbers["at step"]) == (0.9, 10)


@pytest.mark.parametrize("lost", ["eval/reward_std", "eval/scored_images"])
def test_without_a_standard_error_nothing_is_claimed(lost):
    records = [evaluated(0, 0.1), evaluated(9, 0.9)]
    for record in records:
        del record[lost]
    assert learning_of(run_of(*records))[0] == "unknown"


def test_a_number_of_images_that_cannot_be_gives_no_standard_error():
    assert learning_of(run_of(evaluated(0, 0.1), evaluated(9, 0.9, images=-1)))[0] == "unknown"


def test_a_constant_reward_teaches_nothing():
    steps = [{"step": step, "reward/mean": 0.25, "reward/std": 0.0} for step in (1, 2, 3)]
    _, found = learning_of(run_of(evaluated(0, 0.25, 0.0), *steps))
    assert (found.level, found.numbers) == ("warning", {"run": "a", "change": "did not move"})


def test_rewards_of_training_samples_do_not_tell_what_was_learned():
    steps = [{"step": step, "reward/mean": 0.1 * step, "reward/std": 0.1} for step in (1, 2, 3)]
    _, found = learning_of(run_of(*steps))
    assert found.numbers["change"] == "unknown"
    assert found.numbers["reward of training samples"] == pytest.approx([0.1, 0.3])


def test_a_run_that_logged_nothing_is_said_to():
    assert learning_of(run_of({"step": 1}))[1].numbers == {"run": "a", "change": "unknown"}
