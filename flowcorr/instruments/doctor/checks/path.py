"""The check of the steps outside the SDE window, which no log-prob covers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.instruments.doctor.checks.timesteps import same
from flowcorr.instruments.doctor.exam import FACTOR_ERRORS, Exam, largest_gap
from flowcorr.instruments.doctor.findings import failed, judged, skipped
from flowcorr.instruments.doctor.trials import TRAINING_STEP
from flowcorr.instruments.finding import Finding
from flowcorr.instruments.gap_words import percent
from flowcorr.models import DTYPES, Schedule
from flowcorr.rollout.precision import NO_GAP, coarse_weights
from flowcorr.rollout.sampler import step_outside
from flowcorr.rollout.witnesses import seeded_start

# Medians over the samples, since a small error sends single images another way. Clean runs of the embedded model (bf16,
# fp8, int4, guidance) stay below 1 in errors of the window, and below 1.6 where one or two samples have the leg.
LARGEST = 2.5
# Share of a leg's way, of its initial noise, and of one of its steps that may be too much or too little; rounding to
# bfloat16 under guidance gives up to .003, .0001 and .03.
WAY, START, STEP = 0.006, 0.003, 0.15
FEWEST = 4  # samples whose factors have a spread
REMEDY = (
    "compare the initial noise, prompt embeddings, guidance, timesteps and schedule of the steps outside the window in "
    "both stacks, and leave latents as they are between the steps"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leg:
    """The actor's repetition of one leg of all samples.

    Attributes:
        name: in words.
        begin: `[B, *L]`, the engine's latents at its start.
        gap: `[B, *L]`, the engine's latents at its end less the actor's.
        moves: by step of the schedule, how far it took the actor's latents `[B, *L]`; 0 where it is not in the leg.
    """

    name: str
    begin: Tensor
    gap: Tensor
    moves: dict[int, Tensor]

    @property
    def way(self) -> Tensor:
        """Displacement `[B, *L]` from the leg's start to its end."""
        return torch.stack(list(self.moves.values())).sum(0)

    def median_gap(self) -> float:
        """Median over the samples that have steps in the leg: the gap as a share of the way."""
        way, gap = self.way.flatten(1).norm(dim=1), self.gap.flatten(1).norm(dim=1)
        has_steps = way > 0
        return float((gap[has_steps] / way[has_steps]).median())


@torch.no_grad()
def walked(exam: Exam) -> Iterator[Leg]:
    """The legs that have steps, each from the engine's own latents."""
    rollout = exam.trials.base.rollout
    window, indices, total = rollout.window, rollout.window.step_indices, len(exam.trials.schedule.timesteps)
    start = seeded_start(
        rollout,
        seed=exam.config.trainer.seed,
        training_step=TRAINING_STEP,
        same_in_group=exam.config.rollout.same_initial_noise,
    ).to(window.latents.device)
    none, last = torch.zeros_like(indices[:, 0]), torch.full_like(indices[:, 0], total)
    begins = [("before the window", start, none)]
    begins += [
        ("between its steps", window.next_latents[:, t], indices[:, t] + 1) for t in range(rollout.num_steps)
    ]
    ends = [(window.latents[:, t], indices[:, t]) for t in range(rollout.num_steps)]
    if rollout.final_latents is not None:
        ends.append((rollout.final_latents, last))
    for place, ((name, begin, first), (end, after)) in enumerate(zip(begins, ends, strict=False)):
        arrived, moves = _walk(exam, begin, first, after)
        if moves:
            name = "after the window" if place == rollout.num_steps else name
            yield Leg(name=name, begin=begin, gap=end - arrived, moves=moves)


def _walk(exam: Exam, begin: Tensor, first: Tensor, after: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """The actor's latents after its steps from `first` to before `after` `[B]`, and the moves of each."""
    actor, sampling, schedule = exam.actor, exam.config.sampling, _schedule(exam)
    rollout = exam.trials.base.rollout
    assert rollout.members is not None, "`run_trials` has named them"
    latents, moves = begin.clone(), dict[int, Tensor]()
    for index, timestep in enumerate(schedule.timesteps):
        active = ((first <= index) & (index < after)).nonzero().squeeze(1)
        if not len(active):
            continue
        moved = torch.zeros_like(latents)
        for rows in active.split(exam.trials.num_prompts):  # all together may not fit
            chosen = rollout.select(rows)
            velocity = actor.family.velocity(
                actor.weights.transformer,
                latents[rows],
                latents.new_full((len(rows),), timestep),
                chosen.sample_conditioning(),
                actor.guidance,
            )
            noise = None
            if index in sampling.noisy_steps:
                noise = sde.step_noise(
                    rollout.latent_shape,
                    chosen.group_ids.tolist(),
                    rollout.members[rows].tolist(),
                    seed=exam.config.trainer.seed,
                    training_step=TRAINING_STEP,
                    step_index=index,
                ).to(latents.device)
            sigmas = schedule.sigmas[index : index + 2]
            moved[rows] = step_outside(latents[rows], velocity, sigmas, sampling, noise) - latents[rows]
        latents, moves[index] = latents + moved, moved
    return latents, moves


def check_path(exam: Exam) -> Finding:
    window = exam.trials.base.rollout.window
    if not same(
        window.timesteps, window.timesteps.new_tensor(_schedule(exam).timesteps)[window.step_indices]
    ):
        return skipped("the engine computes with other timesteps than the schedule's, see timesteps")
    unit = min(max(exam.trials.base.velocity_gap(), NO_GAP), largest_gap(exam.usual_gap))
    legs = list(walked(exam))
    if not legs:
        return skipped("no step lies outside the SDE window")
    largest, name = max((leg.median_gap() / unit, leg.name) for leg in legs)
    if largest <= LARGEST and not coarse_weights(exam.config):
        for leg in legs:
            found = _systematic(leg)
            if found is not None:
                text, factor, limit = found
                return failed(f"{text} {leg.name}", REMEDY, value=abs(factor), limit=limit, leg=leg.name)
    return judged(
        largest,
        LARGEST,
        "the steps outside the window lead where the actor's do",
        f"the steps {name} lead elsewhere: half of the samples that take them are more than {largest:.2g} errors "
        "of the window away",
        REMEDY,
        leg=name if largest > LARGEST else None,
    )


def _schedule(exam: Exam) -> Schedule:
    """The schedule, with the timesteps that a transformer of the engine's dtype computes with."""
    return exam.actor.family.in_dtype(exam.trials.schedule, DTYPES[exam.config.rollout.dtype])


def _systematic(leg: Leg) -> tuple[str, float, float] | None:
    """A fault that the gaps of all samples share, beside rounding: in words, its factor and its limit."""
    directions = [("of the way is too {} in the steps", leg.way, WAY)]
    directions += [
        (f"of step {index} is too {{}} in the steps", move, STEP)
        for index, move in leg.moves.items()
        if move.norm() >= leg.gap.norm()  # of a smaller step, rounding alone may be a multiple
    ]
    if leg.name.startswith("before"):
        directions.insert(0, ("of the initial noise is too {} in the steps", leg.begin, START))
    for text, direction, limit in directions:
        rows = direction.flatten(1).double()
        rows = rows[taken := rows.any(1)]
        factors = (leg.gap.flatten(1).double()[taken] * rows).sum(1) / rows.square().sum(1)
        factor = factors.median()
        error = (
            1.86 * (factors - factor).abs().median() / len(factors) ** 0.5
        )  # of the median of normal factors
        if abs(factor) > limit and abs(factor) > FACTOR_ERRORS * error and len(factors) >= FEWEST:
            share = percent(abs(float(factor)))
            return f"{share} {text.format('much' if factor > 0 else 'little')}", float(factor), limit
    return None
