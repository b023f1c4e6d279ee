"""Checks that a weight sync took effect: at one fixed point the engine's velocity must change as the actor's does.

The trainer computes the actor's velocity. Workers on other machines get it with the weights, so that they need
neither a text encoder nor the actor's transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError
from flowcorr.models import DTYPES, Conditioning, Guidance, ModelFamily, SamplingPlan, Schedule
from flowcorr.models.in_engine import check_in_engine
from flowcorr.records import Prompt
from flowcorr.references import Reference
from flowcorr.rollout.base import Weights
from flowcorr.rollout.precision import usual_gap

PROMPT = "cat"
LARGEST_GAP = 0.25  # largest relative difference of the velocities of two stacks with the same model
# Times the actor's rounding, or the gap before training if that is larger. Changes of clean engines differ by half of
# the actor's change and at most .82 of its rounding: nine families in bfloat16, guidance 1 and 4, adapters beside the
# weights and merged, changes that are all rounding and up to 40 times as large (seeds 100 to 102); float32 stays far
# below. A lost sync is seen where the actor's change is above three times its rounding, 1.5 to 7 % of the velocity.
NOISE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbePoint:
    """The input at which both velocities are computed: latents `[*L]`, one timestep, one row of conditioning."""

    latents: Tensor
    timestep: float
    conditioning: Conditioning
    guidance: Guidance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Velocities:
    """Both velocities `[*L]` at the probe's point under the same weights, float32 on the CPU."""

    engine: Tensor
    actor: Tensor

    def gap(self) -> float:
        """The relative difference: norm of the difference over the norm of the actor's velocity."""
        return float((self.engine - self.actor).norm() / self.actor.norm().clamp(min=1e-12))

    def check_finite(self) -> None:
        """Refuse velocities that are not finite, of which no difference says anything.

        Raises:
            BackendError: the message names the side.
        """
        for side, velocity in (("engine", self.engine), ("actor", self.actor)):
            if not bool(velocity.isfinite().all()):
                raise BackendError(
                    f"the {side}'s velocity is not finite: the weights have diverged (lower actor.lr in a new run), "
                    "the model's files are damaged, or numbers overflow in float16 (use bfloat16)"
                )


def probe_point(
    family: ModelFamily,
    guidance: Guidance,
    schedule: Schedule,
    latent_shape: tuple[int, ...],
    references: tuple[Reference, ...] = (),
) -> ProbePoint:
    """The fixed point: pure noise at a step in the middle of the schedule."""
    encoded = family.checked_embed([Prompt(text=PROMPT, images=references)], guidance)
    return ProbePoint(
        latents=sde.initial_noise(latent_shape, [0], [0], seed=0, training_step=0)[0],
        timestep=schedule.timesteps[len(schedule.timesteps) // 2],
        conditioning={name: rows[0].cpu() for name, rows in encoded.items()},
        guidance=guidance,
    )


def untrained(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with every LoRA B at zero: the weights with which the engine starts."""
    return {
        name: torch.zeros_like(tensor) if ".lora_B." in name else tensor for name, tensor in tensors.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActorProbe:
    """The actor's side of the check.

    Attributes:
        point: the input at which both velocities are computed.
        start: the actor's velocity `[*L]` under the weights with which the engine starts.
        rounding: how far rounding takes the actor's velocity, as a share of it.
        largest_gap: the largest relative difference of both velocities that their precision explains.
        velocity: returns the actor's velocity `[*L]` under some weights.
    """

    point: ProbePoint
    start: Tensor
    rounding: float
    largest_gap: float
    velocity: Callable[[Weights], Tensor]

    def shipped(self) -> ActorProbe:
        """The probe for engines in other processes, which get each velocity with the weights."""
        return replace(self, velocity=sent_velocity)


def sent_velocity(weights: Weights) -> Tensor:
    """The actor's velocity `[*L]` that was sent with `weights`."""
    assert weights.probe_velocity is not None, "`RayRollout` adds the actor's velocity to all weights"
    return weights.probe_velocity


def actor_probe(
    family: ModelFamily,
    config: Config,
    tensors: Mapping[str, Tensor],
    references: tuple[Reference, ...] = (),
) -> ActorProbe:
    """The probe that runs the actor's transformer.

    Args:
        family: the actor's pipeline, with its text encoders still in place.
        config: the run's configuration.
        tensors: the current trained tensors.
        references: the reference images of one of the run's prompts.

    Raises:
        ConfigError: a family of the user's own reads what an engine does not have.
    """
    dtype = DTYPES[config.rollout.dtype]
    plan = SamplingPlan.of(family, config.sampling)
    guidance = family.guidance_in_dtype(plan.guidance, dtype)
    schedule = family.in_dtype(plan.schedule, dtype)
    point = probe_point(family, guidance, schedule, plan.latent_shape, references)
    if ":" in family.place():  # flowcorr's families are tested for it
        check_in_engine(family, *_inputs(family, point))
    start = actor_velocity(family, untrained(tensors), point)
    # The last bit of all latents: what else changes is as small, so that nearly all of it is another rounding.
    next_to_it = replace(point, latents=point.latents * (1 + torch.finfo(family.dtype).eps))
    other = actor_velocity(family, untrained(tensors), next_to_it)
    return ActorProbe(
        point=point,
        start=start,
        rounding=Velocities(engine=other, actor=start).gap(),
        largest_gap=usual_gap(config, family.amplification(plan.guidance)),
        velocity=lambda weights: actor_velocity(family, weights.tensors, point),
    )


@torch.no_grad()
def actor_velocity(family: ModelFamily, tensors: Mapping[str, Tensor], point: ProbePoint) -> Tensor:
    """The actor's velocity with `tensors` in place of the transformer's current ones."""

    def with_tensors(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(family.transformer, dict(tensors), args, kwargs)

    return family.velocity(with_tensors, *_inputs(family, point))[0].float().cpu()


def _inputs(family: ModelFamily, point: ProbePoint) -> tuple[Tensor, Tensor, Conditioning, Guidance]:
    """The point as a batch of one on the actor's device: latents, timesteps, conditioning and guidance."""
    device = next(family.transformer.parameters()).device
    return (
        point.latents.to(device)[None],
        torch.tensor([point.timestep], device=device),
        {name: row.to(device)[None] for name, row in point.conditioning.items()},
        point.guidance,
    )


class MoveCheck:
    """Compares the changes of both velocities from sync to sync.

    The two stacks never agree exactly, and one update may change the velocity by less than their difference. Such a
    change proves nothing. The next check then measures from the same start, until the changes add up to enough.

    Args:
        start: both velocities before the first sync.
        rounding: see `ActorProbe`. Kernels may agree to the bit on the untrained weights, and no longer do with an
            adapter, so that the gap of `start` does not tell.
        largest_gap: likewise; a larger one of `start` is no measure of precision.

    Raises:
        BackendError: the velocities differ too much to come from the same model.
    """

    def __init__(self, start: Velocities, *, rounding: float, largest_gap: float) -> None:
        start.check_finite()
        if not start.gap() <= LARGEST_GAP:
            raise BackendError(
                f"before training, the velocities of engine and actor differ by {start.gap():.0%}: they hold different "
                "models, or sample differently; compare model.path and rollout.engine, and run flowcorr doctor"
            )
        self._anchor = start
        self._noise = NOISE * max(min(start.gap(), largest_gap), rounding) * float(start.actor.norm())

    def contradiction(self, reached: Velocities) -> str | None:
        """Compare the changes since the last conclusive comparison.

        Returns:
            How the engine's velocity changed otherwise than the actor's, in words; None where it did not, or where both
            changes are too small to tell.

        Raises:
            BackendError: a velocity is not finite.
        """
        reached.check_finite()
        engine, actor = reached.engine - self._anchor.engine, reached.actor - self._anchor.actor
        moved, off, scale = (
            float(actor.norm()),
            float((engine - actor).norm()),
            float(self._anchor.actor.norm()),
        )
        differs = not off <= 0.5 * moved + self._noise
        if differs or moved > 2 * self._noise:
            self._anchor = reached
        if not differs:
            return None
        return (
            f"the actor's velocity changed by {moved / scale:.2e} (relative), the engine's by "
            f"{float(engine.norm()) / scale:.2e}, and the two changes differ by {off / scale:.2e}"
        )
