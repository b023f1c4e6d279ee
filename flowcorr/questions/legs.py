"""Legs of a rollout between its stochastic steps, and their steps taken again: the only walk along a schedule.

A leg leads from one stochastic step of the window to the next. Each starts from the rollout's own values, so it does
not inherit the differences of the leg before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowcorr.sde.transition import over_elements

LegName = Literal["before", "between", "after"]
Step = Callable[[int, Tensor, Tensor], Tensor]
"""`(step index, latents [b, *L] before it, their samples [b]) -> latents [b, *L] after it`."""
SAME_LATENTS = 1e-5  # latents have unit scale; float32 keeps 1e-7 of it


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

    @property
    def broken(self) -> Tensor:
        """`[B]` bool: the sample has no step in the leg, and yet its latents differ there."""
        apart = (self.end - self.begin).flatten(1).abs().amax(1)
        return (self.first == self.stop) & ~(apart <= SAME_LATENTS)

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


def repeat(every: Iterable[Leg], step: Step, stand_still: Step) -> list[Repeated]:
    """Take the steps of legs again.

    Args:
        every: the legs.
        step: of the training stack.
        stand_still: the same step with a velocity of 0.
    """
    repeated = []
    for leg in every:
        arrived, moves = leg.walk(step)
        still, _ = leg.walk(stand_still)
        way = torch.where(over_elements(leg.first < leg.stop, still), leg.end - still, 0)
        repeated.append(Repeated(leg=leg, gap=leg.end - arrived, way=way, moves=moves))
    return repeated


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
