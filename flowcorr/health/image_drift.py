"""Detects reward hacking: images drift far from the first step's while the reward rises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowcorr.health.of_run import RUN
from flowcorr.health.rule import BrokenRule, Rule

PREFIX = "reward/image/"
_METRICS = [row.name for row in RUN if row.name.startswith(PREFIX)]
_SHARES = ("dark", "saturated")
_SHARE_LIMIT = 0.25  # change of a share of pixels
_FACTOR_LIMIT = 2.0  # change of another statistic, up or down
_DIVERSITY_LIMIT = 4.0  # also a factor: the images of a prompt become more alike as a policy learns
RULE = Rule(
    name="reward_hacking",
    what="drift of the images",
    patience=3,
    advice="look at the images: if they are worse, the policy exploits the reward; add a reward term or a reward.gold "
    "that detects it, raise actor.kl_coef, lower actor.lr, or use an earlier checkpoint; where motion fell, the videos "
    "freeze, which a reward of single frames does not see: add a reward that takes videos",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDrift:
    """A statistic of the images, now and at the start of the run.

    Attributes:
        metric: its full name.
        start, now: its values.
        size: its change, as a multiple of its limit.
    """

    metric: str
    start: float
    now: float
    size: float

    @property
    def statistic(self) -> str:
        return self.metric.removeprefix(PREFIX)


class DriftDetector:
    """Follows the images of a run, and compares each training step with the first."""

    def __init__(self) -> None:
        self._start: Mapping[str, Any] | None = None

    def update(self, metrics: Mapping[str, Any]) -> list[BrokenRule]:
        """The statistic with the largest drift, if it is beyond its limit and the reward rose."""
        start = self._start = metrics if self._start is None else self._start
        drift = largest_drift(metrics, start)
        before, now = start.get("reward/mean"), metrics.get("reward/mean")
        if drift is None or drift.size <= 1 or before is None or now is None or now <= before:
            return []
        broken = RULE.broken(
            f"the reward rose while the image statistic {drift.statistic} changed by more than its limit",
            {
                "metric": drift.metric,
                "value": drift.size,
                "limit": 1.0,
                "at the start": drift.start,
                "now": drift.now,
                "reward then": before,
                "reward now": now,
            },
            beyond=drift.size - 1,
        )
        return [broken]


def largest_drift(metrics: Mapping[str, Any], start: Mapping[str, Any]) -> ImageDrift | None:
    """The statistic with the largest change since the first step; None if none was logged.

    A reward may log scores of its own below `PREFIX`, which tell nothing.
    """
    drifts = []
    for name in _METRICS:
        begin, now = start.get(name), metrics.get(name)
        if begin is not None and now is not None and begin >= 0 and now >= 0:
            size = _size(name.removeprefix(PREFIX), begin, now)
            drifts.append(ImageDrift(metric=name, start=begin, now=now, size=size))
    return max(drifts, key=lambda drift: drift.size, default=None)


def _size(statistic: str, start: float, now: float) -> float:
    if statistic in _SHARES:
        return abs(now - start) / _SHARE_LIMIT
    limit = _DIVERSITY_LIMIT if statistic == "diversity" else _FACTOR_LIMIT
    least = 1e-6  # a blank image has no contrast
    return abs(math.log((now + least) / (start + least))) / math.log(limit)
