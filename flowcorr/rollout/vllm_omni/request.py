"""The request for one sample, as plain values that any transport can carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flowcorr.config.schema import SamplingConfig
from flowcorr.models import Schedule

EXTRA = "flowcorr"
"""The key of our part of a request's `extra_args`."""
CONDITIONING, LATENTS, TIMESTEP = "conditioning", "latents", "timestep"
"""Keys of a request's prompt: the sample's text conditioning, as the actor encoded it, and a probe's point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a trajectory is drawn; samples with equal plans may share a forward pass.

    Attributes:
        sampling: transition, noise level, window size, guidance.
        schedule: the actor's sigma table, so that engine and actor cannot disagree on it.
        latent_shape: `L`.
        with_means: also return the step means.
    """

    sampling: SamplingConfig
    schedule: Schedule
    latent_shape: tuple[int, ...]
    with_means: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sample: who it is, which decides its noise, and where its window starts.

    Attributes:
        plan: how it is drawn.
        seed: the run's seed.
        training_step: the step that the rollout belongs to.
        group: id of the prompt's group.
        member: place within the group.
        start: first SDE step.
        same_initial_noise: all members of the group start from one noise.
        policy_version: optimizer updates behind the weights that are to sample.
    """

    plan: Plan
    seed: int
    training_step: int
    group: int
    member: int
    start: int
    same_initial_noise: bool
    policy_version: int

    def to_extra(self) -> dict[str, Any]:
        return {EXTRA: asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A request for the velocity at the latents and timestep that its prompt holds beside the conditioning."""

    guidance_scale: float
    true_cfg_scale: float

    def to_extra(self) -> dict[str, Any]:
        return {EXTRA: {"probe": asdict(self)}}


def from_extra(extra: Mapping[str, Any] | None) -> Job | Probe:
    """Read what `to_extra` wrote; lists may have taken the place of tuples on the way.

    Raises:
        ValueError: the request is not one of ours.
    """
    if not extra or EXTRA not in extra:
        raise ValueError(
            f"the request has no extra_args[{EXTRA!r}]: this pipeline samples training rollouts; "
            "for other requests start vllm-omni with the model's own pipeline"
        )
    values = dict(extra[EXTRA])
    if "probe" in values:
        return Probe(**values["probe"])
    plan = dict(values.pop("plan"))
    sampling = dict(plan.pop("sampling"))
    sampling["sde_window_range"] = tuple(sampling["sde_window_range"])
    schedule = {name: tuple(entries) for name, entries in plan.pop("schedule").items()}
    plan["latent_shape"] = tuple(plan["latent_shape"])
    return Job(
        plan=Plan(sampling=SamplingConfig(**sampling), schedule=Schedule(**schedule), **plan), **values
    )
