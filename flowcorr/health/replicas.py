"""Finds the faulty one among many rollout workers, by comparing its gap with the others'.

The metric is a worker's `relative_gap`: its |delta log p| divided by the mean of all workers at the same steps of the
schedule, so that it does not depend on the steps that a worker happened to draw. From its logarithm the median of the
other workers is subtracted. The rest varies by chance from training step to training step. A worker is faulty if its
mean over the last steps lies six standard errors above the others. Of healthy runs of 60 steps with gaps that vary by
20 or 35 %, about one in a hundred names a worker (500 draws of each with 4, 5 and 6 workers: 0 to 9).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

from flowcorr.correction.modes import OUTLIER_Z
from flowcorr.health.rule import BrokenRule, Rule

WINDOW = 8  # training steps that are looked at together
EARLIER = 32  # training steps, at most, that tell how much a gap varies
LEAST_STEPS = 3
LEAST_CHANGES = 7  # of all workers but one, from step to step: fewer do not tell how much a gap varies
LEAST_FACTOR = 1.25  # GPUs of different kinds round differently
_METRIC = "rollout_corr/worker_{}/relative_gap"
_NAME = re.compile(r"rollout_corr/worker_([0-9]{1,4})/relative_gap")
_ROUNDING = 1e-9  # of a gap that is 0

RULE = Rule(
    name="worker",
    what="a rollout worker's gap beside that of the others",
    advice="the fault is this worker's own: compare its weights, its adapter and its versions of packages with another "
    "worker's; a band of `auto` thresholds rejects what it samples where it leaves the noise of the others",
)


class ReplicaMonitor:
    """Follows the workers of a run.

    Args:
        places: by worker, where it runs, in words.
    """

    def __init__(self, places: Mapping[int, str] = MappingProxyType({})) -> None:
        self._places = places
        # By worker, the logarithm of its gap beside the median of the others', of the last training steps.
        self._distances: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=EARLIER))

    def update(self, metrics: Mapping[str, Any]) -> list[BrokenRule]:
        """The workers at fault after this training step, by comparing their gaps with the others'."""
        gaps = {
            int(match[1]): math.log(value + _ROUNDING)
            for name, value in metrics.items()
            if (match := _NAME.fullmatch(name)) and value is not None and value >= 0
        }
        if len(gaps) < 2:
            return []
        for worker, gap in gaps.items():
            others = median(value for other, value in gaps.items() if other != worker)
            self._distances[worker].append(gap - others)
        least = max(LEAST_STEPS, 1 + math.ceil(LEAST_CHANGES / (len(gaps) - 1)))
        known = [worker for worker in sorted(gaps) if len(self._distances[worker]) >= least]
        noise = self._noise() if known else math.inf
        odd = []
        for worker in known:
            distances = list(self._distances[worker])[-WINDOW:]
            limit = max(OUTLIER_Z * noise / math.sqrt(len(distances)), math.log(LEAST_FACTOR))
            if fmean(distances) > limit:
                odd.append(self._odd(worker, math.exp(fmean(distances)), math.exp(limit)))
        return odd

    def _odd(self, worker: int, factor: float, limit: float) -> BrokenRule:
        known = worker in self._places
        place = f" ({self._places[worker]})" if known else ""
        numbers = {"metric": _METRIC.format(worker), "value": factor, "limit": limit, "worker": worker}
        return RULE.broken(
            f"the gap of rollout worker {worker}{place} is larger than that of the others",
            numbers | ({"place": self._places[worker]} if known else {}),
            beyond=factor - limit,
            part=f"worker {worker}",
        )

    def _noise(self) -> float:
        """The standard deviation of a worker's distance from step to step: the median over the workers.

        It is told by changes, which a fault that lasts leaves as they are.
        """
        changes = [
            [right - left for left, right in itertools.pairwise(distances)]
            for distances in self._distances.values()
        ]
        return median(
            math.sqrt(fmean(change**2 for change in of_worker) / 2) for of_worker in changes if of_worker
        )
