"""Reward hacking: the images change far from where they started while the reward rises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowcorr.diagnostics.health_rules import Rule

PREFIX = "reward/image/"
_SHARES = ("dark", "saturated")
_SHARE_LIMIT = 0.25  # change of a share of pixels
_FACTOR_LIMIT = 2.0  # change of another statistic, up or down
_DIVERSITY_LIMIT = 4.0  # likewise: the images of a prompt grow alike as a policy learns
RULE = Rule(
    name="reward_hacking",
    metric=PREFIX,
    what="drift of the images",
    high=1.0,
    patience=3,
    advice="look at the images: where they are worse, the policy exploits the reward; add a term or a reward.gold that "
    "notices it, raise actor.kl_coef, lower actor.lr, or stop at an earlier checkpoint",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDrift:
    """A statistic of the images, now and at the start of the run.

    Attributes:
        metric: its whole name.
        start, now: its values.
        size: its change in limits: above 1 it is far from its start.
    """

    metric: str
    start: float
    now: float
    size: float


def largest_drift(metrics: Mapping[str, Any], start: Mapping[str, Any]) -> ImageDrift | None:
    """The statistic of a training step that is furthest from the first step's; None if none was logged."""
    drifts = [
        ImageDrift(metric=name, start=start[name], now=value, size=_size(name, start[name], value))
        for name, value in metrics.items()
        if name.startswith(PREFIX) and value is not None and start.get(name) is not None
    ]
    return max(drifts, key=lambda drift: drift.size, default=None)


def _size(name: str, start: float, now: float) -> float:
    statistic = name.removeprefix(PREFIX)
    if statistic in _SHARES:
        return abs(now - start) / _SHARE_LIMIT
    limit = _DIVERSITY_LIMIT if statistic == "diversity" else _FACTOR_LIMIT
    least = 1e-6  # a blank image has no contrast
    return abs(math.log((now + least) / (start + least))) / math.log(limit)
