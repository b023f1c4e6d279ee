"""Exact checks of what an engine returns: the numbers that seeds, schedule and configuration leave no choice of.

Each is an equality, so it holds in every precision of the weights, and a single training step decides it. Noise comes
from generators that are seeded by (seed, training step, group, member), so it is drawn again here. The engine's step
means need not be returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.config.schema import Config, SamplingConfig
from flowcorr.models import Schedule, windows_of
from flowcorr.records import Rollout, Window
from flowcorr.sde.transition import mean_over_elements

SAME_LATENTS = 1e-5  # latents have unit scale; float32 keeps 1e-7 of it
_ROUNDING = 4 * torch.finfo(torch.float32).eps
_SPARE_BITS = 0x1FFF  # the last 13 of 23: float16, bfloat16 and TF32 leave them 0
_AT_THE_BOUND = (
    3  # elements with exactly the largest size; of float32 noise two are rare, three do not happen
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Compared:
    """A rollout beside the numbers that its seeds, the schedule and the configuration give.

    Attributes:
        rollout: the samples, with their members.
        config: the run's.
        schedule: of the training stack, for latents of this shape.
        training_step: seeded windows and noise.
    """

    rollout: Rollout
    config: Config
    schedule: Schedule
    training_step: int

    @cached_property
    def windows(self) -> Tensor:
        """The SDE steps `[B, T]` that the seeds give, on the CPU."""
        groups, members = owners(self.rollout)
        return windows_of(self.config.sampling, groups, members, **self._seeds)

    @cached_property
    def start(self) -> Tensor:
        """The initial noise `[B, *L]` that the seeds give, on the CPU."""
        return seeded_start(self.rollout, **self._seeds, same_in_group=self.config.rollout.same_initial_noise)

    @cached_property
    def noise(self) -> Tensor:
        """The noise `[B, T, *L]` that the seeds give to the steps of the window, on the CPU."""
        return seeded_noise(self.rollout, **self._seeds)

    @cached_property
    def stds(self) -> Tensor:
        """The full standard deviations `[B, T]` that the configuration gives to the steps at their noise levels."""
        return configured_stds(self.rollout, self.config.sampling)

    @property
    def other_windows(self) -> Tensor:
        """`[B]` bool: the SDE steps are not those of the seeds."""
        found = self.rollout.window.step_indices.cpu()
        if found.shape != self.windows.shape:
            return torch.ones(self.rollout.num_samples, dtype=torch.bool)
        return (found != self.windows).any(1)

    @property
    def sigma_errors(self) -> Tensor:
        """`[B, T]`, how far the noise levels of the steps are from those of the schedule; of its nearest step, where an
        index is none of the schedule's.
        """
        window, levels = self.rollout.window, torch.tensor(self.schedule.sigmas)
        own = torch.stack([levels[:-1], levels[1:]])[:, window.step_indices.cpu().clamp(0, len(levels) - 2)]
        return (torch.stack([window.sigmas, window.sigmas_next]).cpu() - own).abs().amax(0)

    @property
    def std_errors(self) -> Tensor | None:
        """`[B, T]`, relative difference of the stds from the configuration's; None where none are returned."""
        stds = self.rollout.window.stds
        return None if stds is None else (stds / self.stds - 1).abs()

    @property
    def log_prob_errors(self) -> Tensor:
        """`[B, T]`, how far the log-probs are from those of the seeds' noise: nats per latent element."""
        unscaled = self.config.sampling.cps_unscaled
        return log_prob_errors(self.rollout, self.noise, self.stds, cps_unscaled=unscaled)

    @property
    def broken_trajectories(self) -> Tensor:
        """`[B]` bool: latents differ where the trajectory leaves no room between them."""
        return broken_trajectories(self.rollout, self.start, len(self.schedule.timesteps))

    @property
    def _seeds(self) -> dict[str, int]:
        return {"seed": self.config.trainer.seed, "training_step": self.training_step}


def seeded_noise(rollout: Rollout, *, seed: int, training_step: int) -> Tensor:
    """The noise `[B, T, *L]` that the seeds give to the steps of the window, on the CPU."""
    indices = rollout.window.step_indices.tolist()
    noise = torch.empty(rollout.num_samples, rollout.num_steps, *rollout.latent_shape)
    for index in sorted({index for row in indices for index in row}):
        at = [
            (sample, t) for sample, row in enumerate(indices) for t, found in enumerate(row) if found == index
        ]
        samples, places = torch.tensor(at).unbind(1)
        noise[samples, places] = sde.step_noise(
            rollout.latent_shape,
            *owners(rollout, samples),
            seed=seed,
            training_step=training_step,
            step_index=index,
        )
    return noise


def seeded_start(rollout: Rollout, *, seed: int, training_step: int, same_in_group: bool) -> Tensor:
    """The initial noise `[B, *L]` that the seeds give, on the CPU."""
    return sde.initial_noise(
        rollout.latent_shape,
        *owners(rollout),
        seed=seed,
        training_step=training_step,
        same_in_group=same_in_group,
    )


def configured_stds(rollout: Rollout, sampling: SamplingConfig) -> Tensor:
    """The full standard deviations `[B, T]` that the configuration gives to the steps at their noise levels."""
    window = rollout.window
    nothing = torch.zeros_like(window.sigmas)[..., None]
    step = sde.transition(
        sampling.sde_type, nothing, nothing, window.sigmas, window.sigmas_next, sampling.noise_level
    )
    return step.std


def without_velocity(window: Window, sampling: SamplingConfig) -> sde.Transition:
    """The steps of a window, were the velocity 0: means `[B, T, *L]` and stds `[B, T]`."""
    nothing = torch.zeros_like(window.latents)
    return sde.transition(
        sampling.sde_type,
        window.latents,
        nothing,
        window.sigmas,
        window.sigmas_next,
        sampling.noise_level,
    )


def velocity_gap(means: Tensor, others: Tensor, still: Tensor) -> float:
    """Root mean square difference of both velocities, as a share of the second.

    A mean is linear in the velocity, so that the step's own factors cancel.

    Args:
        means: `[B, T, *L]`, step means.
        others: likewise.
        still: likewise, those of a velocity of 0.
    """
    difference = mean_over_elements((means - others).double().square(), 2)
    whole = mean_over_elements((others - still).double().square(), 2)
    return float((difference / whole.clamp(min=1e-30)).mean().sqrt())


def log_prob_errors(rollout: Rollout, noise: Tensor, stds: Tensor, *, cps_unscaled: bool) -> Tensor:
    """`[B, T]`, how far the log-probs are from those of steps with this noise: nats per latent element.

    A log-prob is that of `x' = mean + s noise` under the mean and `s` that drew it, so the mean cancels. What float32
    rounds of `x'`, in units of `s`, is no error.

    Args:
        rollout: the samples.
        noise: `[B, T, *L]`, of their seeds.
        stds: `[B, T]`, of the configuration.
        cps_unscaled: `sampling.cps_unscaled`.
    """
    implied = sde.noise_variance(rollout.log_probs, stds, cps_unscaled=cps_unscaled)
    errors = (implied - mean_over_elements(noise.to(implied.device).square(), 2)).abs() / 2
    sizes = mean_over_elements(rollout.window.next_latents.square(), 2).sqrt()
    return (errors - _ROUNDING * sizes / stds).clamp(min=0)


def broken_trajectories(rollout: Rollout, start: Tensor, num_steps: int) -> Tensor:
    """`[B]` bool: latents differ where the trajectory leaves no room between them.

    The first step of the schedule begins at the initial noise, a step of the window ends where the next one of the
    schedule begins, and the last step ends at the final latents.

    Args:
        rollout: the samples.
        start: `[B, *L]`, their initial noise.
        num_steps: of the schedule.
    """
    window, final = rollout.window, rollout.final_latents
    steps = window.step_indices
    broken = torch.zeros(rollout.num_samples, dtype=torch.bool, device=steps.device)
    pairs = [(steps[:, 0] == 0, start.to(steps.device), window.latents[:, 0])]
    pairs += [
        (steps[:, t + 1] == steps[:, t] + 1, window.next_latents[:, t], window.latents[:, t + 1])
        for t in range(rollout.num_steps - 1)
    ]
    if final is not None:
        pairs.append((steps[:, -1] == num_steps - 1, window.next_latents[:, -1], final))
    for same, one, other in pairs:
        gap = (one - other).flatten(1).abs().amax(1)
        broken |= same & ~(gap <= SAME_LATENTS)
    return broken


def coarse_latents(rollout: Rollout) -> Tensor:
    """`[B]` bool: some latents of the sample were rounded to half precision, or clamped to a bound.

    Rounded are the latents of a step if all their elements are. A bound shows in elements of exactly one size, the
    largest of the sample or of the batch at that place.
    """
    window, final = rollout.window, rollout.final_latents
    places = [*window.latents.unbind(1), *window.next_latents.unbind(1)] + ([] if final is None else [final])
    coarse = torch.zeros(rollout.num_samples, dtype=torch.bool, device=window.latents.device)
    for place in places:
        rows = place.float().flatten(1).contiguous()
        coarse |= ((rows.view(torch.int32) & _SPARE_BITS) == 0).all(1) & rows.any(1)
        sizes = rows.abs()
        largest = sizes.amax(1)
        coarse |= ((sizes == largest[:, None]).sum(1) >= _AT_THE_BOUND) & (largest > 0)
        at_bound = (sizes == largest.max()) & (largest.max() > 0)
        # Images of a prompt may share their latents until their first noise.
        distinct = list({tuple(row): place for place, row in enumerate(rows[:, :16].tolist())}.values())
        if int(at_bound[distinct].sum()) >= _AT_THE_BOUND:
            coarse |= at_bound.any(1)
    return coarse


def owners(rollout: Rollout, samples: Tensor | slice = slice(None)) -> tuple[list[int], list[int]]:
    """Groups and members of samples, which seed their noise."""
    assert rollout.members is not None, "the trainer has named the members"
    rows = samples.to(rollout.group_ids.device) if isinstance(samples, Tensor) else samples
    return rollout.group_ids[rows].tolist(), rollout.members[rows].tolist()
