"""Bounds from the noise of earlier training steps, for a correction that never sees its batch as a whole.

A mode's values are compared with their noise at the same step of the schedule, on the scale of `rejection.near_normal`,
on which noise is nearly normal; `step_z` compares log-ratios themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcorr.correction.bounds import Criterion
from flowcorr.correction.modes import OUTLIER_Z
from flowcorr.correction.ratios import LogRatios, log_ratios, one_sample
from flowcorr.correction.rejection import from_near_normal, near_normal, widened
from flowcorr.correction.robust import Noise, noise_of_rows
from flowcorr.distributed import gather_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """The units that log-ratios `[B, T]` are in.

    Attributes:
        step_indices: `[B, T]` int64, places in the schedule; a sample belongs to its first step.
        num_steps: `S`, steps of the schedule.
        scale: the factor on log-ratios.
        num_elements: `D`; None if unknown.
    """

    step_indices: Tensor
    num_steps: int
    scale: float
    num_elements: int | None

    def rows(self, criterion: Criterion) -> Tensor:
        """The step of the schedule that each of a mode's values belongs to."""
        return self.step_indices[:, 0] if criterion.mode.level == "sample" else self.step_indices


def measured_noise(criterion: Criterion, ratios: LogRatios, units: Units) -> Noise:
    """Noise of a mode's values at each step, over the batch of all ranks; a rank may have no samples."""
    floor = torch.where(ratios.valid, ratios.floor(units.num_elements), 0.0)
    largest = gather_rows(floor, "the resolution of log-probs").amax()
    values = ratios.delta
    if criterion.mode.needs != "z":
        values = near_normal(criterion.mode, criterion.mode.value(ratios))
        rounding = criterion.mode.value(one_sample(largest, ratios.delta.shape[1], units.scale))
        largest = near_normal(criterion.mode, rounding.abs().amax())
    return _noise(criterion, values, ratios, units, floor=largest)


def measured_slack(criterion: Criterion, ratios: LogRatios, slack: Tensor, units: Units) -> Tensor:
    """Median slack of each step `[S]`, on the scale of `measured_noise`."""
    values = slack_values(criterion, ratios, slack, units)
    if criterion.mode.needs != "z":
        values = near_normal(criterion.mode, values)
    return _noise(criterion, values, ratios, units, floor=0.0).centre


def slack_values(criterion: Criterion, ratios: LogRatios, slack: Tensor, units: Units) -> Tensor:
    """Evaluate a mode with `slack` `[B, T]` as the log-ratios; `[B, T]` for steps, `[B]` for samples.

    A mean that is shifted by `r` standard deviations of a step has the exact KL `r^2 / 2` and moves the log-ratio by
    about `r / sqrt(D)`, so the KL that belongs to a log-ratio `d` is `D d^2 / 2`.
    """
    if criterion.mode.needs == "z":
        return slack
    slack = torch.where(ratios.valid, slack.double(), 0.0)
    kl = (units.num_elements or 1) * slack.square() / 2
    shifted = log_ratios(slack, torch.zeros_like(slack), ratios.valid, kl, scale=units.scale)
    return criterion.mode.value(shifted).abs()


def judged_by(
    noise: Noise | None, criterion: Criterion, ratios: LogRatios, slack: Tensor, units: Units
) -> tuple[LogRatios, Criterion]:
    """The criterion with bounds for each term or sample, and log-ratios with the z-scores that it reads.

    Bounds hold `centre +- 6 spread`, widened by the slack. At a step without known noise they are infinite, and
    z-scores are 0.

    Args:
        noise: of earlier training steps `[S]`; None for no measurement.
        criterion: an `auto` one, or one of z-scores.
        ratios: of a micro-batch, `[B, T]`.
        slack: `[B, T]`, distance that log-ratios may lie beyond the noise.
        units: of `ratios`.
    """
    mode, rows, slack = criterion.mode, units.rows(criterion), slack_values(criterion, ratios, slack, units)
    noise = noise or Noise.unknown(ratios.delta.new_zeros(units.num_steps))
    if mode.needs == "z":
        z = noise.z(ratios.delta, rows, slack=slack)
        return replace(ratios, z=torch.where(ratios.valid, z, 0.0)), criterion
    centre, reach = noise.centre[rows], OUTLIER_Z * noise.spread[rows]
    lower, upper = criterion.lower, centre + reach
    if mode.bounds.is_band:
        lower, upper = centre - reach - slack, upper + slack
        lower = lower.where(lower.isfinite(), -math.inf)
    else:
        upper = widened(mode, from_near_normal(mode, upper), slack)
    return ratios, replace(criterion, lower=lower, upper=upper.where(upper.isfinite(), math.inf))


def _noise(
    criterion: Criterion, values: Tensor, ratios: LogRatios, units: Units, *, floor: float | Tensor
) -> Noise:
    valid = ratios.valid.any(1) if criterion.mode.level == "sample" else ratios.valid
    return noise_of_rows(values, valid, units.rows(criterion), units.num_steps, floor=floor)
