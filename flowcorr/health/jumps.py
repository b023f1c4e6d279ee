"""Detects measures of the gap that leave their own spread over earlier training steps."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from flowcorr.correction.modes import MAD_TO_STD, OUTLIER_Z
from flowcorr.health.rule import DOCTOR, BrokenRule, Rule
from flowcorr.rollout.precision import NO_GAP

# Each measure, with the value up to which float32 explains it.
MEASURES: Mapping[str, float] = {
    r"rollout_corr/logprob_abs_diff_mean": 1e-6,
    r"rollout_corr/step_\d+/logprob_abs_diff": 1e-6,
    r"rollout_corr/exact_kl": NO_GAP**2 / 2,
    r"rollout_corr/replay/window": NO_GAP,
}
EARLIER = 32  # training steps, at most, that a measure is compared with

RULE = Rule(
    name="jump",
    what="the gap of both stacks",
    each_time=True,
    advice="rounding does not jump: a part of the engine broke in this step, or its weights did not arrive; look at "
    f"its log there, and {DOCTOR} on the newest checkpoint",
)
RISE = Rule(
    name="rise",
    what="the gap of both stacks",
    advice="rounding does not rise at once: a part of the engine broke some steps ago, or the updates since then moved "
    f"the weights far; {DOCTOR} on the newest checkpoint",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A change of a measure that one of the rules looks for.

    Attributes:
        rule: the rule.
        steps: training steps, of whose logarithms the median is compared with the earlier ones.
        earliest: earlier training steps, at least.
        floor: of a measure's logarithm, beside the robust deviation of the earlier steps, which is itself an estimate.
    """

    rule: Rule
    steps: int
    earliest: int
    floor: float


# In clean runs of 40 steps of the embedded model (seed 2001; fp8, and bfloat16 with guidance 4) a logarithm spreads by
# 0.15 to 0.3. At 0.3, 200,000 draws of 6 earlier steps had no false jump; at 0.5 one in 4,000. Four steps see a gap
# that is 2.5 times as large as before in 9 of 16 runs in reduced precision, three times in 13 (seeds 301 and 351).
CHANGES = (
    _Change(rule=RULE, steps=1, earliest=6, floor=0.15),
    _Change(rule=RISE, steps=4, earliest=16, floor=0.1),
)


class JumpDetector:
    """Compares each training step with earlier ones that sampled with weights of the same age."""

    def __init__(self) -> None:
        self._earlier: dict[tuple[str, float], deque[float]] = {}

    def update(self, metrics: Mapping[str, Any]) -> list[BrokenRule]:
        """For each rule the measure that is furthest beyond its limit in this step, if any is.

        The limit is six robust deviations above the median of the earlier steps, on a logarithmic scale, over the root
        of the number of steps.
        """
        age = metrics.get("rollout/staleness_max") or 0.0
        broken: dict[str, tuple[float, BrokenRule]] = {}
        for metric, value in metrics.items():
            rounding = _rounding(metric)
            if rounding is None or value is None or not math.isfinite(value):
                continue
            earlier = self._earlier.setdefault((metric, age), deque(maxlen=EARLIER))
            levels = [*earlier, math.log(max(value, rounding))]
            for change in CHANGES:
                before, now = levels[: -change.steps], median(levels[-change.steps :])
                if len(before) < change.earliest:
                    continue
                usual = median(before)
                deviation = MAD_TO_STD * median(abs(one - usual) for one in before)
                limit = usual + OUTLIER_Z * (deviation + change.floor) / math.sqrt(change.steps)
                worst, _ = broken.get(change.rule.name, (0.0, None))
                if now - limit > worst:
                    broken[change.rule.name] = (
                        now - limit,
                        _broken(change, metric, now, limit, usual, len(before)),
                    )
            earlier.append(levels[-1])
        return [one for _, one in broken.values()]


def _broken(change: _Change, metric: str, now: float, limit: float, usual: float, steps: int) -> BrokenRule:
    value, largest = math.exp(now), math.exp(limit)
    numbers = {
        "metric": metric,
        "value": value,
        "limit": largest,
        "usual": math.exp(usual),
        "steps before": steps,
    }
    happened = "jumped" if change.steps == 1 else f"has risen for {change.steps} steps"
    return change.rule.broken(
        f"{change.rule.what} {happened} out of its spread in the steps before",
        numbers,
        beyond=value - largest,
    )


def _rounding(metric: str) -> float | None:
    return next((value for name, value in MEASURES.items() if re.fullmatch(name, metric)), None)
