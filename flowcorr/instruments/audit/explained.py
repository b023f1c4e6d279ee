"""How large a gap the stated precision and staleness of a run explain, step by step of the schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, cast

import torch

from flowcorr.config.schema import Config, SamplingConfig
from flowcorr.dumps.replay import ReplaySamples
from flowcorr.errors import FlowcorrError
from flowcorr.records import Terms
from flowcorr.rollout.precision import ROUNDINGS, accounted_gap, coarse_weights, usual_gap
from flowcorr.rollout.step_distance import distances
from flowcorr.sde import SdeType

VERDICT = (
    "flowcorr doctor comes first: the gap is larger than the run's precision explains, so a part of engine or trainer "
    "is wrong"
)
REMEDY = (
    "replay captured samples, flowcorr doctor FOLDER --model PATH, or examine the engine, flowcorr doctor RECIPE; no "
    "correction repairs a fault"
)
COARSEST = "int4"
"""The rounding that is taken where a run does not state its precision."""
# Guided velocities are larger than those of `distances`, which the same share of them moves farther. In int4, steps of
# guidance 4 are up to 1.6 times as far apart as those velocities would be (seeds 101 to 103).
_GROWTH = 1 / 3
_GUIDED = 4.0  # the scale at which roundings were measured, where a run does not state its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What a run states of its precision and its steps.

    Attributes:
        precision: in words.
        velocity_gap: the largest one that it accounts for.
        guidance_scale: 1 is off.
        sde_type, noise_level: of the window's steps.
        sigmas: of the whole schedule; empty where they are not known.
    """

    precision: str
    velocity_gap: float
    guidance_scale: float = _GUIDED
    sde_type: SdeType = "sde"
    noise_level: float = SamplingConfig().noise_level
    sigmas: Sequence[float] = ()

    @classmethod
    def of(cls, config: Config) -> Self:
        """What the configuration of a run of flowcorr states."""
        names = dict.fromkeys((config.rollout.dtype, config.model.dtype, *sorted(coarse_weights(config))))
        return cls(
            precision=" and ".join(names),
            velocity_gap=usual_gap(config),
            guidance_scale=max(config.sampling.guidance_scale, config.sampling.true_cfg_scale),
            sde_type=config.sampling.sde_type,
            noise_level=config.sampling.noise_level,
        )

    @classmethod
    def of_captured(cls, samples: ReplaySamples | None) -> Self:
        """What captured samples state; without them, or without their `dtype`, the precision is `COARSEST`."""
        dtype = None if samples is None else samples.dtype
        scale = None if samples is None else samples.guidance_scale
        scale = _GUIDED if scale is None else scale
        # That no run is this coarse is likely already, and `distances` is a bound: there is no margin for it.
        gap = ROUNDINGS[COARSEST].at(scale) if dtype is None else accounted_gap({dtype}, scale, apart=True)
        precision = dtype or f"{COARSEST}, the coarsest there is (ReplaySamples.dtype states another)"
        if samples is None or samples.noise_level is None:
            return cls(precision=precision, velocity_gap=gap, guidance_scale=scale)
        sigmas = samples.tensors().get("sigmas")
        return cls(
            precision=precision,
            velocity_gap=gap,
            guidance_scale=scale,
            sde_type=cast(SdeType, samples.sde_type),
            noise_level=samples.noise_level,
            sigmas=() if sigmas is None else sigmas.tolist(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """The step whose gap is farthest beyond what is explained.

    Attributes:
        step_index: its place in the schedule.
        r: its distance of step means, in stds.
        limit: the largest one that the precision explains there.
        precision: in words.
    """

    step_index: int
    r: float
    limit: float
    precision: str

    def __str__(self) -> str:
        return (
            f"At step {self.step_index}, where it is farthest beyond, r is {self.r:.2g}, and {self.precision} explains "
            f"{self.limit:.2g}. If older weights sampled, dump policy_versions and version: these samples are left out."
        )


def beyond(gap: Terms, stated: Stated) -> Beyond | None:
    """The step of a gap that is farthest beyond what is explained; None where all are within, or none can be judged.

    Args:
        gap: with exact KLs; samples of older weights are not to be among them.
        stated: of the run.
    """
    assert gap.old_rollout_kl is not None, "a gap has exact KLs"
    found = []
    for index in gap.step_index.unique().tolist():
        here = gap.step_index == index
        kl = float(gap.old_rollout_kl[here].mean())
        limit = _limit(gap, stated, index)
        r = math.sqrt(2 * max(kl, 0.0))
        if r > limit:
            found.append(Beyond(step_index=index, r=r, limit=limit, precision=stated.precision))
    return max(found, key=lambda one: one.r / one.limit, default=None)


def _limit(gap: Terms, stated: Stated, index: int) -> float:
    """The largest distance of step means that is explained at a step; infinite where its noise levels are not known."""
    if index + 1 < len(stated.sigmas):
        sigma, following = stated.sigmas[index], stated.sigmas[index + 1]
    elif gap.sigma is None or gap.step is None:
        return math.inf
    else:
        here = gap.step_index == index
        sigma, step = float(gap.sigma[here][0]), float(gap.step[here][0])
        lower = gap.sigma[gap.sigma < sigma]  # of the steps behind it: a longer step explains more
        following = sigma - step if math.isfinite(step) else float(lower.max()) if lower.numel() else 0.0
    if not math.isfinite(sigma):
        return math.inf
    before, after = (torch.tensor([level], dtype=torch.float64) for level in (sigma, max(following, 0.0)))
    try:
        plain = distances(stated.sde_type, before, after, stated.noise_level, stated.velocity_gap)
        return float(plain) * (1 + max(0.0, stated.guidance_scale - 1) * _GROWTH)
    except FlowcorrError:  # no noise level of an SDE step
        return math.inf
