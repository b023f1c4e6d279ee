"""Scoring of videos, by rewards that take them or by rewards of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from flowcorr.records import ImageArray
from flowcorr.rewards.base import RewardOutput

TOGETHER = 4
"""Videos that a reward gets at a time if it scores each by itself: only so many are copied."""

Score: TypeAlias = Callable[[ImageArray, np.ndarray], RewardOutput]
"""Scores images or videos of the samples at some rows of the batch."""


def score_videos(
    score: Score, reward: Callable[..., Any], videos: ImageArray, rows: np.ndarray, rule: str
) -> RewardOutput:
    """Scores of the videos at `rows`, of which the reward gets copies.

    Args:
        score: calls the reward.
        reward: says whether it `takes_videos`, and whether it `overlaps`, which lets it score a few at a time.
        videos: of all samples.
        rows: places of the samples that are scored, at least one.
        rule: by which a reward of images gets frames, see `reward.terms[].frames`.
    """
    size = TOGETHER if getattr(reward, "overlaps", False) else len(rows)
    parts = np.split(rows, range(size, len(rows), size))
    if getattr(reward, "takes_videos", False):
        return RewardOutput.concatenate([score(videos[part], part) for part in parts])
    return RewardOutput.concatenate([_score_frames(score, videos, part, rule) for part in parts])


def chosen_frames(rule: str, num_frames: int) -> range:
    """The frames that a rule of `reward.terms[].frames` chooses from a video of `num_frames`."""
    if rule == "middle":
        return range(num_frames // 2, num_frames // 2 + 1)
    return range(0, num_frames, 1 if rule == "mean" else int(rule.removeprefix("every ")))


def _score_frames(score: Score, videos: ImageArray, rows: np.ndarray, rule: str) -> RewardOutput:
    """The mean over the chosen frames of each score and extra, NaN where one of them is; and why a frame failed."""
    frames = chosen_frames(rule, videos.shape[1])
    outputs = [score(videos[rows, frame], rows) for frame in frames]
    names = outputs[0].extra
    return replace(
        outputs[0],
        scores=np.mean([output.scores for output in outputs], axis=0),
        extra={name: np.mean([output.extra[name] for output in outputs], axis=0) for name in names},
        errors={
            row: f"frame {frame}: {error}"
            for frame, output in reversed(list(zip(frames, outputs, strict=True)))
            for row, error in output.errors.items()
        },
    )
