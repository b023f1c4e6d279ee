"""How large a gap the stated precision and staleness of a run explain, step by step of the schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from torch import Tensor

from flowcorr.config.schema import Config, SamplingConfig
from flowcorr.dumps.replay import ReplaySamples
from flowcorr.errors import FlowcorrError
from flowcorr.records import Terms, Window
from flowcorr.rollout.precision import MARGIN, accounted_gap, coarse_weights, usual_gap
from flowcorr.sde import SdeType, transition
from flowcorr.sde.transition import over_elements

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
# Root mean square of `x1 - x0`, at most, where the data have at most the variance of the noise; guidance lengthens it
# by up to 1.6 at a scale of 4 (seeds 101 to 103). Models with random weights have velocities of any length.
_VELOCITY, _GROWTH = 1.5, 1 / 3
_GUIDED = 4.0  # the scale at which roundings were measured, where a run does not state its own
_ERRORS = 2.0  # standard errors
# In late steps, rounding is up to 3 times as large a share of the velocity as in the windows of `ROUNDINGS`, and up to
# .76 of it (int4, fp8 and bfloat16, guidance 1 and 4, steps 5 to 9 of 10, seeds 311 to 313 and 321). `MARGIN` is 3.
_LATE, _LARGEST_SHARE = 2.0, 1.0
# Weights of four training steps ago move velocities of `tiny_ocr_lora` by .04 of them (seed 311), linear in the steps.
_STALE_GAP = MARGIN * 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """Precision and steps of a run, as it states them.

    Attributes:
        precision: in words.
        velocity_gap: the largest one that it accounts for, as a share of the velocity.
        velocity: root mean square of velocities: as measured, or at most.
        sde_type, noise_level: of the window's steps; a noise level of None is not known, and then nothing is judged.
        sigmas: of the whole schedule; empty where they are not known.
        indexed: whether step indices are places in `sigmas`.
    """

    precision: str
    velocity_gap: float
    velocity: float = _VELOCITY
    sde_type: SdeType = "sde"
    noise_level: float | None = None
    sigmas: Sequence[float] = ()
    indexed: bool = True

    @classmethod
    def of(cls, config: Config) -> Self:
        """Read precision and steps from the configuration of a run of flowcorr."""
        names = dict.fromkeys((config.rollout.dtype, config.model.dtype, *sorted(coarse_weights(config))))
        sampling = config.sampling
        return cls(
            precision=" and ".join(names),
            velocity_gap=_at_any_step(usual_gap(config)),
            velocity=_largest_velocity(max(sampling.guidance_scale, sampling.true_cfg_scale)),
            sde_type=sampling.sde_type,
            noise_level=sampling.noise_level,
        )

    @classmethod
    def of_captured(cls, samples: ReplaySamples | None, *, indexed: bool = True) -> Self:
        """Read precision and steps from captured samples; without their `dtype`, the precision is `COARSEST`."""
        coarsest = f"{COARSEST}, the coarsest there is (ReplaySamples.dtype states another)"
        if samples is None:
            return cls(precision=coarsest, velocity_gap=_LARGEST_SHARE)
        scale = _GUIDED if samples.guidance_scale is None else samples.guidance_scale
        stated = cls(
            precision=samples.dtype or coarsest,
            velocity_gap=_at_any_step(accounted_gap({samples.dtype or COARSEST}, scale, apart=True)),
            velocity=_largest_velocity(scale),
            indexed=indexed,
        )
        if samples.noise_level is None:
            return stated
        stated = replace(stated, sde_type=cast(SdeType, samples.sde_type), noise_level=samples.noise_level)
        tensors = samples.tensors()
        if "sigmas" not in tensors:
            return stated
        stated = replace(stated, sigmas=tensors["sigmas"].tolist())
        if "latents" not in tensors:
            return stated
        try:
            return replace(stated, velocity=_captured_velocity(stated, tensors))
        except FlowcorrError:  # no noise levels of SDE steps
            return stated

    def with_distance(self, distance: float, gap: Terms) -> Self:
        """With the velocity that moves the step means of a gap by a root mean square `distance` in stds."""
        assert self.noise_level is not None, "a run of flowcorr has one"
        assert gap.sigma is not None, "it dumps its noise levels"
        assert gap.step is not None, "likewise"
        sigma, nowhere = gap.sigma.double(), torch.zeros_like(gap.sigma.double())[..., None]
        _, per_unit, std = _without_velocity(
            self.sde_type, nowhere, sigma, sigma - gap.step.double(), self.noise_level
        )
        return replace(self, velocity=distance / float((per_unit / std).square().mean().sqrt()))


def _at_any_step(velocity_gap: float) -> float:
    return min(_LATE * velocity_gap, _LARGEST_SHARE)


def _largest_velocity(guidance_scale: float) -> float:
    return _VELOCITY * (1 + max(0.0, guidance_scale - 1) * _GROWTH)


def velocity_of(window: Window, sampling: SamplingConfig) -> float:
    """Root mean square of the velocities that gave the step means of a window."""
    assert window.means is not None, "the audit asks for them"
    still, per_unit, _ = _without_velocity(
        sampling.sde_type, window.latents, window.sigmas, window.sigmas_next, sampling.noise_level
    )
    return float(((window.means - still) / over_elements(per_unit, still)).square().mean().sqrt())


def _captured_velocity(stated: Stated, tensors: Mapping[str, Tensor]) -> float:
    """Upper bound on the root mean square of captured velocities: the latents' movement less the step noise."""
    assert stated.noise_level is not None, "captured"
    latents, sigmas = tensors["latents"].double(), tensors["sigmas"].double()
    places = tensors.get("step_indices", torch.arange(latents.shape[1])).long()
    sigma, following = (level.expand(latents.shape[:2]) for level in (sigmas[places], sigmas[places + 1]))
    still, per_unit, std = _without_velocity(stated.sde_type, latents, sigma, following, stated.noise_level)
    moved = (tensors["next_latents"].double() - still).flatten(2).square().mean(2) / std.square() - 1
    unit = (per_unit / std).square()
    weight = (
        unit.square().sum()
    )  # of least squares: the noise of `moved` is that of `chi^2`, alike in all steps
    error = math.sqrt(2 / latents[0, 0].numel()) / weight.sqrt()
    return float(((unit * moved).sum() / weight + _ERRORS * error).clamp(min=0).sqrt())


def _without_velocity(
    kind: SdeType, latents: Tensor, sigma: Tensor, sigma_next: Tensor, noise_level: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Step means without velocity, how far a velocity of 1 moves a mean, and stds.

    Args:
        kind: of the transition.
        latents: `[*S, *L]` before the steps.
        sigma, sigma_next: `[*S]`, noise levels before and after the steps.
        noise_level: `eta`.

    Raises:
        BatchError, ConfigError: see `flowcorr.sde.transition`.
    """
    still = transition(kind, latents, torch.zeros_like(latents), sigma, sigma_next, noise_level)
    nowhere = torch.zeros_like(sigma)[..., None]
    moved = transition(kind, nowhere, torch.ones_like(nowhere), sigma, sigma_next, noise_level)
    return still.mean, moved.mean[..., 0].abs(), still.std


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """A step with a gap beyond the size that its precision explains.

    Attributes:
        step_index: its place in the schedule.
        r: its distance of step means, in stds.
        limit: the largest one that the precision explains there.
        precision: in words.
        like_staleness: whether weights of a few training steps ago would explain it.
    """

    step_index: int
    r: float
    limit: float
    precision: str
    like_staleness: bool

    def __str__(self) -> str:
        return (
            f"At step {self.step_index}, where it is farthest beyond, r is {self.r:.2g}, and {self.precision} explains "
            f"{self.limit:.2g}. If older weights sampled, dump policy_versions and version: these samples are left "
            "out. If the engine rounds its weights further (fp8, int4), leave ReplaySamples.dtype out."
        )


def beyond(gap: Terms, stated: Stated) -> Beyond | None:
    """Find the step with the largest excess over the explained gap; None without excess or without a judged step.

    Args:
        gap: with exact KLs; samples of older weights are not to be among them.
        stated: of the run.
    """
    assert gap.old_rollout_kl is not None, "a gap has exact KLs"
    excesses = []
    for index in gap.step_index.unique().tolist():
        here = gap.step_index == index
        kl = float(gap.old_rollout_kl[here].mean())
        limit = _limit(gap, stated, index)
        r = math.sqrt(2 * max(kl, 0.0))
        if r > limit:
            like_staleness = r <= limit * _STALE_GAP / stated.velocity_gap
            excesses.append(
                Beyond(
                    step_index=index,
                    r=r,
                    limit=limit,
                    precision=stated.precision,
                    like_staleness=like_staleness,
                )
            )
    return max(excesses, key=lambda one: one.r / one.limit, default=None)


def _limit(gap: Terms, stated: Stated, index: int) -> float:
    """The largest explained distance of step means at a step; infinite if its noise levels are unknown."""
    sigma, following = _levels(gap, stated, index)
    if not math.isfinite(sigma) or stated.noise_level is None:
        return math.inf
    before, after, nowhere = (torch.tensor([level], dtype=torch.float64) for level in (sigma, following, 0.0))
    try:
        _, per_unit, std = _without_velocity(
            stated.sde_type, nowhere[None], before, after, stated.noise_level
        )
    except FlowcorrError:  # no noise level of an SDE step
        return math.inf
    return float(per_unit / std) * stated.velocity * stated.velocity_gap


def _levels(gap: Terms, stated: Stated, index: int) -> tuple[float, float]:
    """Noise levels before and after a step; NaN if unknown."""
    here = gap.step_index == index
    sigma = math.nan if gap.sigma is None else float(gap.sigma[here][0])
    if stated.indexed and index + 1 < len(stated.sigmas):
        return stated.sigmas[index], stated.sigmas[index + 1]
    if not math.isfinite(sigma):
        return math.nan, math.nan
    if gap.step is not None and math.isfinite(step := float(gap.step[here][0])):
        return sigma, max(sigma - step, 0.0)
    if stated.sigmas:
        places = range(len(stated.sigmas) - 1)
        return sigma, stated.sigmas[min(places, key=lambda place: abs(stated.sigmas[place] - sigma)) + 1]
    assert gap.sigma is not None, "it has this step's"
    lower = gap.sigma[gap.sigma < sigma]  # of the steps behind it: a longer step explains more
    return sigma, float(lower.max()) if lower.numel() else 0.0
