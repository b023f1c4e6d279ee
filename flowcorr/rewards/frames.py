"""Scoring of videos, by rewards that take them or by rewards of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from flowcorr.records import ImageArray
from flowcorr.rewards.base import RewardOutput

TOGETHER = 4
"""Videos that a reward gets at a time, whole or as their frames: only so many are copied, whatever the batch."""

Score: TypeAlias = Callable[[ImageArray, np.ndarray], RewardOutput]
"""Scores images or videos, of the samples whose rows in the batch are given beside them."""


def score_videos(
    score: Score, videos: ImageArray, rows: np.ndarray, rule: str, *, takes_videos: bool
) -> RewardOutput:
    """Scores of the videos at `rows`, of which the reward gets copies.

    Args:
        score: calls the reward.
        videos: of all samples.
        rows: places of the samples that are scored, at least one.
        rule: by which a reward of images gets frames, see `reward.terms[].frames`.
        takes_videos: the reward scores videos, and not images of them.
    """
    parts = np.split(rows, range(TOGETHER, len(rows), TOGETHER))
    if takes_videos:
        return RewardOutput.concatenate([score(videos[part], part) for part in parts])
    return RewardOutput.concatenate([_score_frames(score, videos, part, rule) for part in parts])


def chosen_frames(rule: str, num_frames: int) -> range:
    """The frames that a rule of `reward.terms[].frames` chooses from a video of `num_frames`."""
    if rule == "middle":
        return range(num_frames // 2, num_frames // 2 + 1)
    return range(0, num_frames, 1 if rule == "mean" else int(rule.removeprefix("every ")))


def _score_frames(score: Score, videos: ImageArray, rows: np.ndarray, rule: str) -> RewardOutput:
    """Score chosen frames of each video: means of score and extras, NaN if one frame is, and errors by video."""
    frames = chosen_frames(rule, videos.shape[1])
    images = videos[rows[:, None], frames].reshape(-1, *videos.shape[2:])
    output = score(images, rows.repeat(len(frames)))
    errors: dict[int, str] = {}
    for place, error in sorted(output.errors.items()):
        row, frame = divmod(place, len(frames))
        errors.setdefault(row, f"frame {frames[frame]}: {error}")
    return replace(output.map(lambda scores: scores.reshape(len(rows), -1).mean(1)), errors=errors)
