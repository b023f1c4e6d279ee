"""Compares a rollout with the numbers that seeds, configuration and training stack give for it.

Seeds, schedule and configuration determine some numbers exactly. Each of these is an equality, so it holds in every
precision of the weights, and a single training step decides it. Noise comes from generators that are seeded by (seed,
training step, group, member), so it is drawn again here. The engine need not return its step means.

Other numbers need the actor's scores, and include rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.models import Schedule, rollout_schedule, windows_of
from flowcorr.questions.legs import Leg, legs
from flowcorr.records import Rollout, Scores
from flowcorr.sde.transition import mean_over_elements, over_elements

_SAME_NOISE = 1e-4  # factor between two noises that float32 on two devices, and their stds, explain
_ROUNDING = 4 * torch.finfo(torch.float32).eps
_SPARE_BITS = 0x1FFF  # the last 13 of 23: float16, bfloat16 and TF32 leave them 0
_AT_THE_BOUND = (
    3  # elements with exactly the largest size; of float32 noise two are rare, three do not happen
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Compared:
    """A rollout, and the numbers that its seeds, the configuration and the training stack give for it.

    Attributes:
        rollout: the samples, with their members.
        actor: the training stack.
        training_step: seeded windows and noise.
        given_scores: the actor's, with their means; None if it has not scored the rollout.
    """

    rollout: Rollout
    actor: DiffusionActor
    training_step: int
    given_scores: Scores | None = None

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return self.actor.config

    @cached_property
    def schedule(self) -> Schedule:
        """The training stack's, of a rollout with latents of this shape."""
        return rollout_schedule(self.actor.family, self.config.sampling, self.rollout.latent_shape)

    @property
    def seeds(self) -> dict[str, int]:
        """The numbers that seed windows and noise, together with group and member."""
        return {"seed": self.config.trainer.seed, "training_step": self.training_step}

    @cached_property
    def windows(self) -> Tensor:
        """The SDE steps `[B, T]` that the seeds give, on the CPU."""
        groups, members = owners(self.rollout)
        return windows_of(self.config.sampling, groups, members, **self.seeds)

    @cached_property
    def start(self) -> Tensor:
        """The initial noise `[B, *L]` that the seeds give, on the CPU."""
        groups, members = owners(self.rollout)
        same = self.config.rollout.same_initial_noise
        return sde.initial_noise(self.rollout.latent_shape, groups, members, **self.seeds, same_in_group=same)

    @cached_property
    def noise(self) -> Tensor:
        """The noise `[B, T, *L]` that the seeds give to the steps of the window, on the rollout's device."""
        rollout, indices = self.rollout, self.rollout.window.step_indices.cpu()
        noise = torch.empty(rollout.num_samples, rollout.num_steps, *rollout.latent_shape)
        for index in indices.unique().tolist():
            samples, places = (indices == index).nonzero(as_tuple=True)
            groups, members = owners(rollout, samples)
            noise[samples, places] = sde.step_noise(
                rollout.latent_shape, groups, members, **self.seeds, step_index=index
            )
        return noise.to(rollout.log_probs.device)

    @cached_property
    def still(self) -> Tensor:
        """The means `[B, T, *L]` of the window's steps, were the velocity 0."""
        window, sampling = self.rollout.window, self.config.sampling
        nothing = torch.zeros_like(window.latents)
        given = (window.latents, nothing, window.sigmas, window.sigmas_next, sampling.noise_level)
        return sde.transition(sampling.sde_type, *given).mean

    @cached_property
    def stds(self) -> Tensor:
        """The full standard deviations `[B, T]` that the configuration gives to the steps at their noise levels."""
        window, sampling = self.rollout.window, self.config.sampling
        nothing = torch.zeros_like(window.sigmas)[..., None]
        given = (nothing, nothing, window.sigmas, window.sigmas_next, sampling.noise_level)
        return sde.transition(sampling.sde_type, *given).std

    @cached_property
    def places(self) -> Tensor:
        """`[B, T]`: the step of the schedule with the noise level closest to each step's."""
        return (self.rollout.window.sigmas[..., None] - self._levels[:-1]).abs().argmin(-1)

    @property
    def other_windows(self) -> Tensor:
        """`[B]` bool: the SDE steps differ from the seeded window, or their noise levels are of other steps."""
        steps = self.rollout.window.step_indices.cpu()
        if steps.shape != self.windows.shape:
            return torch.ones(self.rollout.num_samples, dtype=torch.bool)
        return ((steps != self.windows) | (steps != self.places.cpu())).any(1)

    @property
    def sigma_errors(self) -> Tensor:
        """`[B, T]`, distance of the steps' noise levels from the closest step of the schedule."""
        window, levels = self.rollout.window, self._levels
        own = torch.stack([levels[self.places], levels[self.places + 1]])
        return (torch.stack([window.sigmas, window.sigmas_next]) - own).abs().amax(0)

    @property
    def _levels(self) -> Tensor:
        return torch.tensor(self.schedule.sigmas, device=self.rollout.window.sigmas.device)

    @property
    def std_errors(self) -> Tensor | None:
        """`[B, T]`, relative difference of the stds from the configuration's; None if no stds were returned."""
        stds = self.rollout.window.stds
        return None if stds is None else (stds / self.stds - 1).abs()

    @property
    def log_prob_errors(self) -> Tensor:
        """`[B, T]`, distance of log-probs from the ones that the seeded noise gives, nats per latent element."""
        unscaled = self.config.sampling.cps_unscaled
        return log_prob_errors(self.rollout, self.noise, self.stds, cps_unscaled=unscaled)

    @property
    def coarse_latents(self) -> Tensor:
        """`[B]` bool: all elements of a step's latents were rounded to half precision, or some clamped to a bound."""
        window, final = self.rollout.window, self.rollout.final_latents
        places = [*window.latents.unbind(1), *window.next_latents.unbind(1)]
        places += [] if final is None else [final]
        coarse = torch.zeros(self.rollout.num_samples, dtype=torch.bool, device=window.latents.device)
        for place in places:
            rows = place.float().flatten(1).contiguous()
            coarse |= ((rows.view(torch.int32) & _SPARE_BITS) == 0).all(1) & rows.any(1)
            coarse |= at_bound(rows).any(1)
        return coarse

    @property
    def legs(self) -> Iterator[Leg]:
        """The steps outside the window, between the initial noise, the window's steps and the final latents."""
        window = self.rollout.window
        return legs(
            self.start.to(window.latents),
            window.latents,
            window.next_latents,
            self.rollout.final_latents,
            window.step_indices,
            len(self.schedule.timesteps),
        )

    @property
    def broken_trajectories(self) -> Tensor:
        """`[B]` bool: latents at the end of a step differ from the latents at the start of the next.

        The first step of the schedule begins at the initial noise, a step of the window ends where the next one of the
        schedule begins, and the last step ends at the final latents.
        """
        return torch.stack([leg.broken for leg in self.legs]).any(0)

    @cached_property
    def scores(self) -> Scores:
        """The actor's scores of the window."""
        return self.actor.score(self.rollout) if self.given_scores is None else self.given_scores

    @property
    def log_probs(self) -> Tensor:
        """`[B, T]`, the actor's, without their graph."""
        return self.scores.log_probs.detach()

    @property
    def means(self) -> Tensor:
        """`[B, T, *L]`, the actor's step means, without their graph."""
        assert self.scores.means is not None, "scores come with their means"
        return self.scores.means.detach()

    @property
    def means_of_seeds(self) -> Tensor:
        """`[B, T, *L]`, the engine's step means, if its steps added the noise of their seeds."""
        window = self.rollout.window
        step = sde.Transition(self.means, self.scores.stds.detach(), window.step_sizes)
        return self.means + (window.next_latents - sde.sample(step, self.noise))

    @property
    def noise_errors(self) -> Tensor:
        """The larger of the step's own and the whole window's `standard_errors`, `[B, T]`; 0 without a score."""
        finite = self.log_probs.isfinite()
        stds = over_elements(self.scores.stds, self.means)
        noise = ((self.rollout.window.next_latents - self.means) / stds)[finite].flatten(1)
        sums = beside_seeds(noise, self.noise[finite].flatten(1))
        errors = torch.zeros_like(self.log_probs, dtype=torch.float64)
        errors[finite] = torch.maximum(standard_errors(sums), standard_errors(sums.sum(1, keepdim=True)))
        return errors

    def velocity(self, latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
        """The actor's velocity `[b, *L]` of some samples, as many at a time as it scores at a time.

        Args:
            latents: `[b, *L]`.
            timesteps: `[b]`.
            rows: `[b]`, the samples.
        """
        size = self.actor.scorer.passes.samples
        parts = zip(*(of.split(size) for of in (latents, timesteps, rows)), strict=True)
        return torch.cat(
            [
                self.actor.velocity(self.rollout.select(chosen).sample_conditioning())(some, at)
                for some, at, chosen in parts
            ]
        )


def velocity_gaps(means: Tensor, others: Tensor, still: Tensor) -> Tensor:
    """`[B]` float64, root mean square difference of both velocities, as a share of the second.

    A mean is linear in the velocity, so that the step's own factors cancel.

    Args:
        means: `[B, T, *L]`, step means.
        others: likewise.
        still: likewise, step means for a velocity of 0.
    """
    difference = mean_over_elements((means - others).double().square(), 2)
    whole = mean_over_elements((others - still).double().square(), 2)
    return (difference / whole.clamp(min=1e-30)).mean(1).sqrt()


def velocity_gap(means: Tensor, others: Tensor, still: Tensor) -> float:
    """`velocity_gaps` of all samples together."""
    return float(velocity_gaps(means, others, still).square().mean().sqrt())


def beside_seeds(noise: Tensor, seeded: Tensor) -> Tensor:
    """`[3, N]` float64: sums over the elements of which `standard_errors` are made.

    Args:
        noise: `[N, D]`, of steps.
        seeded: likewise, of their seeds.
    """
    rest = (noise - seeded).double()
    return torch.stack([(rest * seeded).sum(1), seeded.double().square().sum(1), rest.square().sum(1)])


def standard_errors(sums: Tensor) -> Tensor:
    """Distance of a noise from that of its seeds, along the latter, in standard errors `[N]`.

    The difference of two policies' means does not depend on the noise: its product with it is that of two independent
    directions, whatever the precision.

    Args:
        sums: `[3, N]`: the difference times the seeded noise, the square of the seeded noise, and of the difference.
    """
    along, whole, rest = sums
    return (along.abs() - _SAME_NOISE * whole).clamp(min=0) / rest.sqrt().clamp(min=1e-30)


def log_prob_errors(rollout: Rollout, noise: Tensor, stds: Tensor, *, cps_unscaled: bool) -> Tensor:
    """`[B, T]`, distance of log-probs from the ones that a noise gives, nats per latent element.

    A log-prob scores `x' = mean + s noise` under the mean and `s` that drew it, so the mean cancels. The rounding of
    `x'` in float32, in units of `s`, is subtracted.

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


def at_bound(rows: Tensor) -> Tensor:
    """`[N, D]` bool: elements of latents that were clamped to a bound.

    A bound shows in elements of exactly one size, the largest of a row or of all.
    """
    sizes = rows.abs()
    largest = sizes.amax(1, keepdim=True)
    own = (sizes == largest) & (largest > 0)
    clamped = own & (own.sum(1, keepdim=True) >= _AT_THE_BOUND)
    of_all = own & (sizes == sizes.max())
    # Images of a prompt may share their latents until their first noise.
    distinct = list({tuple(row): place for place, row in enumerate(rows[:, :16].tolist())}.values())
    return clamped | of_all if int(of_all[distinct].sum()) >= _AT_THE_BOUND else clamped


def owners(rollout: Rollout, samples: Tensor | slice = slice(None)) -> tuple[list[int], list[int]]:
    """Groups and members of samples, which seed their noise."""
    assert rollout.members is not None, "the trainer has named the members"
    rows = samples.to(rollout.group_ids.device) if isinstance(samples, Tensor) else samples
    return rollout.group_ids[rows].tolist(), rollout.members[rows].tolist()
