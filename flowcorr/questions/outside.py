"""The steps outside the SDE window, which no log-prob covers, taken again from a rollout's own latents.

A leg leads from one stochastic step of the window to the next. Each starts from the rollout's own values, so it does
not inherit the differences of the leg before it. SDE steps outside the window (`sampling.sde_noise_range`) repeat the
rollout's noise, which its seeds give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.models import DTYPES
from flowcorr.questions.compared import Compared, owners
from flowcorr.rollout.precision import NO_GAP
from flowcorr.rollout.sampler import step_outside
from flowcorr.sde.transition import over_elements

LegName = Literal["before", "between", "after"]
Step = Callable[[int, Tensor, Tensor], Tensor]
"""`(step index, latents [b, *L] before it, their samples [b]) -> latents [b, *L] after it`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leg:
    """Steps of the schedule between two latents that a rollout returned.

    Attributes:
        name: `before` the window, `between` two of its steps, or `after` it.
        begin: `[B, *L]`, the rollout's latents at its start.
        end: `[B, *L]`, the rollout's latents at its end.
        first: `[B]` int64, the first step of each sample.
        stop: `[B]` int64, one more than the last step of each sample; `first` for a sample without a step in the leg.
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
        gap: `[B, *L]`, the rollout's latents at the end of the leg less the training stack's.
        way: `[B, *L]`, the movement by the rollout's velocities: its end less the end without velocity, which is the
            start unless the leg has SDE steps; 0 for a sample without steps.
        moves: by step of the schedule, the movement of the latents `[B, *L]` by the training stack's step.
    """

    leg: Leg
    gap: Tensor
    way: Tensor
    moves: dict[int, Tensor]


def errors_by_leg(repeated: Iterable[Repeated]) -> dict[LegName, tuple[Tensor, Tensor]]:
    """Gap by leg's name as a share of the way, `[b]`, with the samples `[b]` that have steps.

    A name without such a sample is left out.
    """
    squares: dict[LegName, Tensor] = {}
    for part in repeated:
        if part.moves:
            gap, way = (rows.flatten(1).square().sum(1, dtype=torch.float64) for rows in (part.gap, part.way))
            own = torch.stack([gap, way, (part.leg.first < part.leg.stop).double()])
            squares.setdefault(part.leg.name, torch.zeros_like(own)).add_(torch.where(own[2] > 0, own, 0))
    having = {name: sums[2].nonzero().squeeze(1) for name, sums in squares.items()}
    return {name: ((gap / way).sqrt()[having[name]], having[name]) for name, (gap, way, _) in squares.items()}


def window_units(window_gaps: Tensor, usual_gap: float) -> Tensor:
    """`[B]`: the unit of the errors outside the window.

    Rounding moves every step a little, in the window and outside. So the unit is the gap inside the window, and errors
    are about 1 for any precision, guidance and model. If the gap inside the window is larger than the precision
    explains, the largest explained gap is the unit.

    Args:
        window_gaps: `[B]`, relative errors of the velocity in the window.
        usual_gap: the largest that precision explains.
    """
    return window_gaps.clamp(NO_GAP, usual_gap)


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
def repeat_outside(compared: Compared) -> list[Repeated]:
    """Repeat all legs of a rollout; the actor has to hold the weights that sampled."""
    rollout, sampling, device = compared.rollout, compared.config.sampling, compared.rollout.log_probs.device
    # The timesteps that a transformer of `rollout.dtype` computes with, by the training stack's own schedule.
    schedule = compared.actor.family.in_dtype(compared.schedule, DTYPES[compared.config.rollout.dtype])

    def noise(index: int, rows: Tensor) -> Tensor | None:
        if index not in sampling.noisy_steps:
            return None
        groups, members = owners(rollout, rows)
        drawn = sde.step_noise(rollout.latent_shape, groups, members, **compared.seeds, step_index=index)
        return drawn.to(device)

    def take(index: int, latents: Tensor, drift: Tensor, rows: Tensor) -> Tensor:
        sigmas = schedule.sigmas[index : index + 2]
        return step_outside(latents, drift, sigmas, sampling, noise(index, rows))

    def step(index: int, latents: Tensor, rows: Tensor) -> Tensor:
        timesteps = latents.new_full((len(latents),), schedule.timesteps[index])
        return take(index, latents, compared.velocity(latents, timesteps, rows), rows)

    def stand_still(index: int, latents: Tensor, rows: Tensor) -> Tensor:
        return take(index, latents, torch.zeros_like(latents), rows)

    window, repeated = rollout.window, []
    for leg in legs(
        compared.start.to(window.latents),
        window.latents,
        window.next_latents,
        rollout.final_latents,
        window.step_indices,
        len(schedule.timesteps),
    ):
        arrived, moves = leg.walk(step)
        still, _ = leg.walk(stand_still)
        way = torch.where(over_elements(leg.first < leg.stop, still), leg.end - still, 0)
        repeated.append(Repeated(leg=leg, gap=leg.end - arrived, way=way, moves=moves))
    return repeated
