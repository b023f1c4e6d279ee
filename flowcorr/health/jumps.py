"""Detects measures of the gap that leave their own spread over earlier training steps."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
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
EARLIEST, EARLIER = 6, 32  # training steps that a measure is compared with, at least and at most
# Of a measure's logarithm, beside the robust deviation of the earlier steps, which is itself an estimate. In clean runs
# of 40 steps of the embedded model (seed 2001; fp8, and bfloat16 with guidance 4) a logarithm spreads by 0.15 to 0.3.
# At 0.3, 200,000 draws of 6 earlier steps had no false jump; at 0.5 one in 4,000.
FLOOR = 0.15


RULE = Rule(
    name="jump",
    what="the gap of both stacks",
    each_time=True,
    advice="rounding does not jump: a part of the engine broke in this step, or its weights did not arrive; look at "
    f"its log there, and {DOCTOR} on the newest checkpoint",
)


class JumpDetector:
    """Compares each training step with earlier ones that sampled with weights of the same age."""

    def __init__(self) -> None:
        self._earlier: dict[tuple[str, float], deque[float]] = {}

    def update(self, metrics: Mapping[str, Any]) -> list[BrokenRule]:
        """The measure that jumps furthest beyond its limit in this step, if any does.

        The limit is six robust deviations above the median of the earlier steps, on a logarithmic scale.
        """
        age = metrics.get("rollout/staleness_max") or 0.0
        jumps = []
        for metric, value in metrics.items():
            rounding = _rounding(metric)
            if rounding is None or value is None or not math.isfinite(value):
                continue
            earlier = self._earlier.setdefault((metric, age), deque(maxlen=EARLIER))
            level = math.log(max(value, rounding))
            if len(earlier) >= EARLIEST:
                usual = median(earlier)
                deviation = MAD_TO_STD * median(abs(one - usual) for one in earlier)
                limit = usual + OUTLIER_Z * (deviation + FLOOR)
                if level > limit:
                    jumps.append((level - limit, self._broken(metric, value, limit, usual, len(earlier))))
            earlier.append(level)
        return [max(jumps, key=lambda jump: jump[0])[1]] if jumps else []

    def _broken(self, metric: str, value: float, limit: float, usual: float, steps: int) -> BrokenRule:
        numbers = {"metric": metric, "value": value, "limit": math.exp(limit)}
        return RULE.broken(
            f"{RULE.what} jumped out of its spread in the steps before",
            {**numbers, "usual": math.exp(usual), "steps before": steps},
            beyond=abs(value - math.exp(limit)),
        )


def _rounding(metric: str) -> float | None:
    return next((value for name, value in MEASURES.items() if re.fullmatch(name, metric)), None)
