"""The steps outside the SDE window, which no log-prob covers, taken again from a rollout's own latents.

A leg leads from one stochastic step of the window to the next. Each starts from the rollout's own values, so it does
not inherit the differences of the leg before it. SDE steps outside the window (`sampling.sde_noise_range`) repeat the
rollout's noise, which its seeds give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.config.schema import Config
from flowcorr.models import Schedule
from flowcorr.records import Rollout
from flowcorr.rollout.sampler import step_outside
from flowcorr.rollout.witnesses import owners, seeded_start
from flowcorr.sde.transition import over_elements

LegName = Literal["before", "between", "after"]
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(latents [b, *L], timesteps [b], their samples [b]) -> velocity [b, *L]`."""
Step = Callable[[int, Tensor, Tensor], Tensor]
"""`(step index, latents [b, *L] before it, their samples [b]) -> latents [b, *L] after it`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leg:
    """Steps of the schedule between two places where a rollout says its latents.

    Attributes:
        name: `before` the window, `between` two of its steps, or `after` it.
        begin: `[B, *L]`, the rollout's latents at its start.
        end: `[B, *L]`, the rollout's latents at its end.
        first: `[B]` int64, the first step of each sample.
        stop: `[B]` int64, the step before which each sample ends: `first` where it has no step in the leg.
    """

    name: LegName
    begin: Tensor
    end: Tensor
    first: Tensor
    stop: Tensor

    def walk(self, step: Step) -> tuple[Tensor, dict[int, Tensor]]:
        """Take the steps from the leg's start.

        Returns:
            The latents `[B, *L]` at its end; and by step of the schedule how far it took them `[B, *L]`, 0 for samples
            that do not have the step in the leg.
        """
        latents, moves = self.begin, dict[int, Tensor]()
        for index in range(int(self.first.min()), int(self.stop.max())):
            rows = ((self.first <= index) & (index < self.stop)).nonzero().squeeze(1)
            if len(rows):
                arrived = latents.index_copy(0, rows, step(index, latents[rows], rows))
                latents, moves[index] = arrived, arrived - latents
        return latents, moves


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Repeated:
    """A leg, as the training stack repeats it.

    Attributes:
        leg: of the rollout.
        gap: `[B, *L]`, the rollout's latents at its end less those at which the training stack arrives.
        way: `[B, *L]`, the way that the rollout's velocities took: from where the leg would end without velocity, which
            is its start unless it has SDE steps; 0 for a sample without steps.
        moves: by step of the schedule, how far the training stack's step took the latents `[B, *L]`.
    """

    leg: Leg
    gap: Tensor
    way: Tensor
    moves: dict[int, Tensor]


def legs(
    start: Tensor, before: Tensor, after: Tensor, final: Tensor | None, indices: Tensor, num_steps: int
) -> Iterator[Leg]:
    """The legs of a rollout, in their order.

    Args:
        start: `[B, *L]`, the initial noise.
        before: `[B, T, *L]`, the latents before the window's steps.
        after: `[B, T, *L]`, the latents after them.
        final: `[B, *L]`, the final latents; None leaves the last leg out.
        indices: `[B, T]` int64, the window's steps.
        num_steps: of the schedule.
    """
    begins, ends = [start, *after.unbind(1)], [*before.unbind(1), *([] if final is None else [final])]
    firsts = [torch.zeros_like(indices[:, 0]), *(indices + 1).unbind(1)]
    stops = [*indices.unbind(1), torch.full_like(indices[:, 0], num_steps)]
    for place, (begin, end, first, stop) in enumerate(zip(begins, ends, firsts, stops, strict=False)):
        name: LegName = "before" if not place else "after" if place == indices.shape[1] else "between"
        yield Leg(name=name, begin=begin, end=end, first=first, stop=stop)


@torch.no_grad()
def repeat_outside(
    rollout: Rollout, config: Config, training_step: int, schedule: Schedule, velocity: Velocity
) -> list[Repeated]:
    """Repeat all legs of a rollout.

    Args:
        rollout: the samples, with their members.
        config: the run's.
        training_step: seeded their noise.
        schedule: with the timesteps that the rollout's transformer computes with.
        velocity: of the training stack, under the weights that sampled.
    """
    window, seeds = rollout.window, {"seed": config.trainer.seed, "training_step": training_step}
    start = seeded_start(rollout, **seeds, same_in_group=config.rollout.same_initial_noise)

    def noise(index: int, rows: Tensor) -> Tensor | None:
        if index not in config.sampling.noisy_steps:
            return None
        groups, members = owners(rollout, rows)
        drawn = sde.step_noise(rollout.latent_shape, groups, members, **seeds, step_index=index)
        return drawn.to(window.latents.device)

    def step(index: int, latents: Tensor, rows: Tensor) -> Tensor:
        drift = velocity(latents, latents.new_full((len(latents),), schedule.timesteps[index]), rows)
        sigmas = schedule.sigmas[index : index + 2]
        return step_outside(latents, drift, sigmas, config.sampling, noise(index, rows))

    def stand_still(index: int, latents: Tensor, rows: Tensor) -> Tensor:
        sigmas = schedule.sigmas[index : index + 2]
        return step_outside(latents, torch.zeros_like(latents), sigmas, config.sampling, noise(index, rows))

    found = []
    for leg in legs(
        start.to(window.latents),
        window.latents,
        window.next_latents,
        rollout.final_latents,
        window.step_indices,
        len(schedule.timesteps),
    ):
        arrived, moves = leg.walk(step)
        still, _ = leg.walk(stand_still)
        way = torch.where(over_elements(leg.first < leg.stop, still), leg.end - still, 0)
        found.append(Repeated(leg=leg, gap=leg.end - arrived, way=way, moves=moves))
    return found
