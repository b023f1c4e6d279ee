"""How all samples of a run are drawn: its `sampling` section on one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flowcorr import sde
from flowcorr.config.schema import SamplingConfig
from flowcorr.models.base import Guidance, ModelFamily
from flowcorr.models.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """The facts that a rollout engine samples by, checked.

    Attributes:
        sampling: transition, noise level, windows.
        guidance: as `sampling` states it.
        schedule: the steps of a rollout, see `rollout_schedule`; not rounded. An engine samples with
            `ModelFamily.in_dtype` of it.
        latent_shape: `L`.
    """

    sampling: SamplingConfig
    guidance: Guidance
    schedule: Schedule
    latent_shape: tuple[int, ...]

    @classmethod
    def of(cls, family: ModelFamily, sampling: SamplingConfig) -> SamplingPlan:
        """The plan of a run.

        Raises:
            ConfigError: the model cannot make images of this size, or a step that can be stochastic has no density.
        """
        shape = family.sample_shape(sampling.height, sampling.width, sampling.num_frames)
        schedule = rollout_schedule(family, sampling, shape)
        sde.check_schedule(
            sampling.sde_type,
            schedule.sigmas,
            sampling.sde_window_range,
            sampling.noise_level,
            noise_range=sampling.sde_noise_range,
        )
        return cls(sampling=sampling, guidance=Guidance.of(sampling), schedule=schedule, latent_shape=shape)

    def windows(
        self, groups: Sequence[int], members: Sequence[int], *, seed: int, training_step: int
    ) -> Tensor:
        """The SDE steps `[B, T]` of the samples, see `windows_of`."""
        return windows_of(self.sampling, groups, members, seed=seed, training_step=training_step)


def rollout_schedule(
    family: ModelFamily, sampling: SamplingConfig, latent_shape: tuple[int, ...]
) -> Schedule:
    """The schedule of rollouts of latents `L`: the model's own, with some steps merged into longer ones.

    The steps that can be stochastic keep their places in the schedule.
    """
    return family.schedule(sampling.num_inference_steps, latent_shape).begin_at(sampling.rollout_steps)


def windows_of(
    sampling: SamplingConfig, groups: Sequence[int], members: Sequence[int], *, seed: int, training_step: int
) -> Tensor:
    """The SDE steps `[B, T]` that the seeds give to the samples of a run, see `sde.draw_windows`."""
    return sde.draw_windows(
        groups,
        members,
        seed=seed,
        training_step=training_step,
        size=sampling.sde_window_size,
        window_range=sampling.sde_window_range,
        num_inference_steps=sampling.num_inference_steps,
        per=sampling.window_per,
        layout=sampling.sde_window_layout,
    )
