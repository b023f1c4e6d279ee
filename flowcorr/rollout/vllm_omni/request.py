"""The request for one sample, made of plain values that can be serialised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flowcorr.config.schema import SamplingConfig
from flowcorr.models import Schedule

EXTRA = "flowcorr"
"""The key of flowcorr's entry in a request's `extra_args`."""
FAMILY = "flowcorr_family"
"""The key of the model family, as `package.module:Class`, in the pipeline's `custom_pipeline_args`."""
CONDITIONING, LATENTS, TIMESTEP = "conditioning", "latents", "timestep"
"""Keys of a request's prompt: the conditioning as the actor encoded it, and a probe's latents and timestep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to sample a trajectory; samples with equal plans may share a forward pass.

    Attributes:
        sampling: transition, noise level, window size, guidance.
        schedule: the actor's schedule, so that the engine's cannot differ.
        latent_shape: `L`.
        with_means: also return the step means.
    """

    sampling: SamplingConfig
    schedule: Schedule
    latent_shape: tuple[int, ...]
    with_means: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sample: its plan, the numbers that seed its noise, and its window.

    Attributes:
        plan: how to sample it.
        seed: the run's seed.
        training_step: the step that the rollout belongs to.
        group: id of the prompt's group.
        member: index within the group.
        window: its SDE steps, ascending.
        same_initial_noise: all members of the group start from the same noise.
        policy_version: number of optimizer updates of the weights that sample.
    """

    plan: Plan
    seed: int
    training_step: int
    group: int
    member: int
    window: tuple[int, ...]
    same_initial_noise: bool
    policy_version: int

    def to_extra(self) -> dict[str, Any]:
        return {EXTRA: asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A request for one velocity; its prompt holds latents, timestep and conditioning."""

    guidance_scale: float
    true_cfg_scale: float

    def to_extra(self) -> dict[str, Any]:
        return {EXTRA: {"probe": asdict(self)}}


def from_extra(extra: Mapping[str, Any] | None) -> Job | Probe:
    """Read the result of `to_extra`, in which serialisation may have turned tuples into lists.

    Raises:
        ValueError: the request is not from flowcorr.
    """
    if not extra or EXTRA not in extra:
        raise ValueError(
            f"the request has no extra_args[{EXTRA!r}]: this pipeline samples training rollouts; "
            "for other requests start vllm-omni with the model's own pipeline"
        )
    values = _with_tuples(extra[EXTRA])
    if "probe" in values:
        return Probe(**values["probe"])
    plan = values["plan"]
    parts = {"sampling": SamplingConfig(**plan["sampling"]), "schedule": Schedule(**plan["schedule"])}
    return Job(**{**values, "plan": Plan(**{**plan, **parts})})


def _with_tuples(value: Any) -> Any:
    """Plain values with a tuple in place of each list."""
    if isinstance(value, Mapping):
        return {name: _with_tuples(entry) for name, entry in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list | tuple) else value
