"""Judges whether a run learned, by its held-out scores at start and end and their errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flowcorr.health.finding import Finding, Level
from flowcorr.instruments.report.runs import Run

Change = Literal["rose", "fell", "did not move", "unknown"]
# Standard errors beyond which a change is no chance. The errors are taken as independent although both evaluations use
# the same prompts and noise, so that a change that is called one is more certain than that.
_ERRORS = 2.0
_SCORE, _SPREAD, _SCORED = "eval/reward", "eval/reward_std", "eval/scored_images"
_REWARD, _REWARD_SPREAD = "reward/mean", "reward/std"
CONSTANT = "the reward was the same number for all images, so nothing can be learned from it"


_LEVELS: Mapping[Change, Level] = {
    "rose": "healthy",
    "did not move": "warning",
    "fell": "serious",
    "unknown": "note",
}
CHANGES = tuple(_LEVELS)


def learning_of(run: Run) -> tuple[Change, Finding]:
    """Judge the held-out reward of a run; without two evaluations, the finding names the missing one."""
    change, sentence, numbers = _judged(run)
    finding = Finding(
        level=_LEVELS[change],
        cause="learning",
        sentence=sentence,
        numbers={"run": run.name, "change": change, **numbers},
    )
    return change, finding


def _judged(run: Run) -> tuple[Change, str, dict[str, Any]]:
    if is_constant(run.records):
        return "did not move", CONSTANT, {}
    scores = [record for record in run.records if record.get(_SCORE) is not None]
    if len(scores) < 2:
        return _without_scores(run)
    first, last = scores[0], scores[-1]
    before, after = float(first[_SCORE]), float(last[_SCORE])
    numbers = {"from": before, "to": after, "at steps": [first["step"], last["step"]]}
    all_errors = [_standard_error(record) for record in (first, last)]
    errors = [error for error in all_errors if error is not None]
    if len(errors) < 2:
        return "unknown", "the spread or the number of the held-out scores was not logged", numbers
    error = math.hypot(*errors)
    numbers["standard error"] = error
    change: Change = "did not move"
    if abs(after - before) > _ERRORS * error:
        change = "rose" if after > before else "fell"
    best = max(scores, key=lambda record: record[_SCORE])
    if best[_SCORE] - after > _ERRORS * error and change != "fell":
        numbers |= {"best": best[_SCORE], "at step": best["step"]}
    return change, f"the held-out reward {change}", numbers


def _standard_error(record: Mapping[str, Any]) -> float | None:
    """The standard error of an evaluation's mean score; None if its spread or number of images was not logged."""
    if record.get(_SPREAD) is None or (record.get(_SCORED) or 0) <= 0:
        return None
    return float(record[_SPREAD]) / math.sqrt(record[_SCORED])


def _without_scores(run: Run) -> tuple[Change, str, dict[str, Any]]:
    rewards = run.series(_REWARD)
    if not rewards:
        return "unknown", "neither held-out scores nor rewards were logged", {}
    sentence = "there are not two held-out evaluations, so whether it learned cannot be told"
    return "unknown", sentence, {"reward of training samples": [rewards[0][1], rewards[-1][1]]}


def is_constant(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every image of at least two training steps had the same reward."""
    steps = [record for record in records if record.get(_REWARD) is not None]
    means = {record[_REWARD] for record in steps}
    return len(steps) > 1 and len(means) == 1 and all(record.get(_REWARD_SPREAD) == 0 for record in steps)
