"""`auto` thresholds in bypass mode: bands measured on earlier training steps.

In bypass mode the correction acts inside the loss and sees a micro-batch, so it cannot measure a band on the whole
batch. Earlier training steps give it: centre and spread of a mode's values at each step of the schedule, by medians
over all ranks. They are taken over terms scored before the first optimizer step, while the current policy still is the
old one. So bands do not depend on micro-batches, ranks or workers; checkpoints keep them.

The first `WARM_UP` training steps only measure. A band begins at their median, which one bad step among them does not
move. Then it follows new measurements slowly: in a training step, its centre and its half-width change by at most a
tenth of the half-width. So the band follows a gap that grows with the adapter, and faults behave by their size:

- A quarter of the terms, 12 or more standard deviations of the noise away, stays rejected.
- Two fifths move median and spread: the fault is rejected at first, and accepted after some 15 training steps.
- More than half must be accepted in time, or the run would stand still for good. An update that would reject more than
  half of its terms is skipped.

Within a training step the current policy also moves away from the rollout's by learning, within the clip range. So the
correction widens the band by the loss's clip range (`apply.slack_of`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowcorr.algorithm.apply import sees_windows, slack_of
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.bounds import Criterion, scale_factor
from flowcorr.correction.earlier import Units, measured_noise, measured_slack
from flowcorr.correction.modes import OUTLIER_Z
from flowcorr.correction.ratios import LogRatios, log_ratios
from flowcorr.correction.rejection import from_near_normal
from flowcorr.correction.robust import Noise, nan_median
from flowcorr.metrics import Metrics, Stat, maximum
from flowcorr.records import Terms

WARM_UP = 3  # training steps that only measure
GAIN = 0.25  # fraction of the way to a new measurement that the noise moves in a training step
MOST_MOVED = 0.1  # of a band's half-width, in a training step
MOST_REJECTED = 0.5  # of the terms of an update; beyond, their median is the fault's own


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _History:
    """Measurements of a mode in past training steps: centre and spread at each step of the schedule.

    Attributes:
        noise: `[2, S]`, over the training steps so far; 0 without a measurement.
        first: `[2, WARM_UP, S]`, the measurements of the first training steps; 0 for steps to come.
        count: `[S]` int64, number of training steps that measured each step of the schedule.
    """

    noise: Tensor
    first: Tensor
    count: Tensor

    @classmethod
    def empty(cls, num_steps: int, device: torch.device) -> _History:
        first = torch.zeros(2, WARM_UP, num_steps, dtype=torch.float64, device=device)
        return cls(noise=first[:, 0], first=first, count=torch.zeros_like(first[0, 0], dtype=torch.long))

    @property
    def in_force(self) -> Noise:
        """The noise at the steps of the schedule that enough training steps measured."""
        centre, spread = self.noise.where(self.count >= WARM_UP, math.nan)
        return Noise(centre=centre, spread=spread)

    def moved(self, measured: Noise, slack: Tensor) -> _History:
        """Add the noise of one more training step.

        Args:
            measured: the noise.
            slack: `[S]`, the clip range's part in the half-width of the band, on the scale of the noise.
        """
        new, old = torch.stack([measured.centre, measured.spread]), self.noise
        seen, begun = measured.centre.isfinite(), self.count >= WARM_UP
        count = self.count + seen
        place = torch.arange(WARM_UP, device=seen.device)[:, None]
        first = torch.where((place == self.count) & seen, new[:, None], self.first)
        middle = nan_median(first.where(place < count, math.nan).transpose(1, 2)).nan_to_num(0.0)
        most = MOST_MOVED * (OUTLIER_Z * old[1] + slack)
        most = torch.stack([most, most / OUTLIER_Z])
        following = torch.where(seen, old + (GAIN * (new - old)).clamp(-most, most), old)
        return _History(noise=torch.where(begun, following, middle), first=first, count=count)


class MeasuredBands:
    """The bands of `auto` thresholds, and the noise behind z-scores, in bypass mode.

    Args:
        actor: the run's loss, whose clip range is added to the bands.
        num_steps: steps of the schedule.
        window_size: SDE steps a sample.
        device: of the terms.
    """

    def __init__(
        self, actor: ActorConfig, *, num_steps: int, window_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self._actor, self._device = actor, torch.device(device)
        self._num_steps, self._window_size = num_steps, window_size
        self._history: dict[str, _History] = {}

    @property
    def noise(self) -> Mapping[str, Noise]:
        """Noise by mode, for `correct`: it judges the terms of the next training step."""
        return {name: history.in_force for name, history in self._history.items()}

    def observe(
        self, correction: RolloutCorrectionConfig, judged: Sequence[Terms], num_elements: int
    ) -> Metrics:
        """Add the measurements of a training step. All ranks have to call it together.

        Args:
            correction: the one in force; nothing is measured unless it is in bypass mode.
            judged: the terms that were scored before the first optimizer step, as the loss saw them; a rank may have
                none.
            num_elements: `D`.

        Returns:
            The bands that this training step was judged by, without the clip range, by step of the schedule as
            `rollout_corr/step_{}/rollout_rs_<mode>_threshold_low` and `_high`; and
            `rollout_corr/rollout_rs_unmeasured_fraction`, the share of terms that no band judged yet.
        """
        criteria = [criterion for criterion in correction.criteria if criterion.needs_batch]
        if correction.mode != "bypass" or not criteria:
            return Metrics()
        ratios, steps, added = self._columns(correction, judged, num_elements)
        metrics = Metrics()
        for criterion in criteria:
            history = self._history.get(criterion.name) or _History.empty(self._num_steps, self._device)
            metrics = metrics.merge(_described(criterion, history, ratios, steps))
            units = Units(
                step_indices=steps,
                num_steps=self._num_steps,
                scale=scale_factor(correction.log_ratio_scale, num_elements),
                num_elements=num_elements,
            )
            slack = measured_slack(criterion, ratios, added, units)
            self._history[criterion.name] = history.moved(measured_noise(criterion, ratios, units), slack)
        return metrics

    def state(self) -> dict[str, Tensor]:
        """The state for a checkpoint; empty before the first measurement."""
        columns = {}
        for name, history in self._history.items():
            columns[f"{name}/noise"] = history.noise
            columns[f"{name}/first"] = history.first
            columns[f"{name}/count"] = history.count
        return columns

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state`."""
        columns = {name: column.to(self._device) for name, column in state.items()}
        self._history = {
            name: _History(
                noise=columns[f"{name}/noise"],
                first=columns[f"{name}/first"],
                count=columns[f"{name}/count"],
            )
            for name in {name.rpartition("/")[0] for name in columns}
        }

    def _columns(
        self, correction: RolloutCorrectionConfig, judged: Sequence[Terms], num_elements: int
    ) -> tuple[LogRatios, Tensor, Tensor]:
        """Log-ratios `[n, T]` of the terms, their steps of the schedule, and their slack."""
        actor = self._actor
        if not judged:
            width = self._window_size if sees_windows(actor, correction) else 1
            nothing = torch.zeros(0, width, dtype=torch.float64, device=self._device)
            return log_ratios(nothing, nothing, step_kl=nothing), nothing.long(), nothing
        terms = Terms.concatenate([part.windows() for part in judged])
        ratios = log_ratios(
            terms.log_prob,
            terms.rollout_log_prob,
            terms.keep,
            terms.rollout_kl,
            scale=scale_factor(correction.log_ratio_scale, num_elements),
        )
        return ratios, terms.step_index, slack_of(terms, actor, correction)


def _described(criterion: Criterion, history: _History, ratios: LogRatios, steps: Tensor) -> Metrics:
    noise, mode = history.in_force, criterion.mode
    unmeasured = ratios.valid & noise.centre.isnan()[steps]
    metrics = {"rollout_corr/rollout_rs_unmeasured_fraction": ratios.terms.share(unmeasured)}
    if mode.needs != "z":
        prefix = f"rollout_corr/step_{{}}/rollout_rs_{criterion.name}_threshold_"
        reach = OUTLIER_Z * noise.spread
        low, high = noise.centre - reach, noise.centre + reach
        if mode.bounds.is_band:
            metrics[prefix + "low"] = _known(torch.exp(-high))
            metrics[prefix + "high"] = _known(torch.exp(-low))
        else:
            metrics[prefix + "high"] = _known(from_near_normal(mode, high))
    return Metrics(metrics)


def _known(values: Tensor) -> Stat:
    """Values `[S]` that all ranks have in common; a NaN is left out."""
    return maximum(values.nan_to_num(-math.inf))
