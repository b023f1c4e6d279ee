"""Rewards of images score frames of videos."""

import numpy as np
import pytest

from flowcorr.config import RewardTerm
from flowcorr.errors import ConfigError
from flowcorr.records import Prompt
from flowcorr.rewards import RewardOutput, build_reward, frame_rules, score_batch
from flowcorr.rewards.combine import Scorer, WeightedSum
from flowcorr.rewards.frames import TOGETHER, chosen_frames

LEVELS = np.arange(60).reshape(6, 10)  # of the frames of six videos
VIDEOS = np.broadcast_to(LEVELS[:, :, None, None, None], (6, 10, 4, 8, 3)).astype(np.uint8)
PROMPTS = [Prompt(text=f"prompt {place}") for place in range(6)]


def brightness(images, prompts):
    assert images.shape == (len(prompts), 4, 8, 3)
    images += 0  # a reward may write into its images
    scores = images.mean((1, 2, 3))
    return RewardOutput(scores=scores, extra={"twice": 2 * scores})


def score(reward, rule, **facts):
    reward.__dict__.update(facts)
    whole = WeightedSum(scorers=(Scorer(label="own", reward=reward, frames=rule),))
    return score_batch(whole, VIDEOS, PROMPTS)


@pytest.mark.parametrize("takes_videos", [False, True])
def test_a_reward_may_give_its_scores_in_one_array_again_and_again(takes_videos):
    buffer = np.zeros(TOGETHER)

    def of_a_buffer(images, prompts):
        buffer[: len(images)] = images.reshape(len(images), -1).mean(1)
        return buffer[: len(images)]

    expected = LEVELS.mean(1) if takes_videos else LEVELS[:, 5]
    assert score(of_a_buffer, "middle", takes_videos=takes_videos).scores.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("rule", "num_frames", "frames"),
    [
        ("middle", 1, [0]),
        ("middle", 9, [4]),
        ("mean", 3, [0, 1, 2]),
        ("every 4", 9, [0, 4, 8]),
        ("every 4", 4, [0]),
        ("every 100", 9, [0]),
    ],
)
def test_frames_of_a_rule(rule, num_frames, frames):
    assert list(chosen_frames(rule, num_frames)) == frames


@pytest.mark.parametrize(
    ("rule", "frames"), [("middle", [5]), ("mean", range(10)), ("every 3", [0, 3, 6, 9])]
)
def test_a_reward_of_images_gets_the_mean_over_frames(rule, frames):
    output = score(brightness, rule)
    assert output.scores == pytest.approx(LEVELS[:, list(frames)].mean(1))
    assert output.extra["twice"] == pytest.approx(2 * output.scores)


def test_a_reward_that_takes_videos_gets_them_whole():
    seen = []

    def last_frame(videos, prompts):
        seen.append(len(prompts))
        return videos[:, -1].mean((1, 2, 3))

    output = score(last_frame, "middle", takes_videos=True)
    assert output.scores == pytest.approx(LEVELS[:, -1])
    assert seen == [TOGETHER, 6 - TOGETHER]


def test_a_frame_that_fails_fails_its_sample():
    def picky(images, prompts):
        scores = images.mean((1, 2, 3))
        bad = {int(row): "it is too dark" for row in np.flatnonzero(scores == 13)}
        return RewardOutput(scores=np.where(scores == 13, np.nan, scores), errors=bad)

    whole = WeightedSum(scorers=(Scorer(label="own", reward=picky, frames="mean"),))
    output = score_batch(whole, VIDEOS, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, True, False, False, False, False]
    assert whole(VIDEOS, PROMPTS).errors == {1: "frame 3: it is too dark"}


def test_built_in_rewards_of_videos():
    videos = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32, 3), dtype=np.uint8)
    term = RewardTerm(name="jpeg_incompressibility", frames="mean")
    one, whole = build_reward([term]), videos.reshape(6, 32, 32, 3)
    by_frame = one(whole, PROMPTS).scores.reshape(2, 3)
    assert one(videos, PROMPTS[:2]).scores == pytest.approx(by_frame.mean(1))
    assert frame_rules([term, RewardTerm(name="ocr")], own=True) == {
        "jpeg_incompressibility": "mean",
        "ocr": "middle",
    }


@pytest.mark.parametrize("rule", ["first", "every 0", "every", "every 2.5", ""])
def test_an_unknown_rule_is_an_error(rule):
    with pytest.raises(ConfigError, match=rf"^reward\.terms\[ocr\]\.frames={rule!r} .*middle, mean, "):
        RewardTerm(name="ocr", frames=rule)
