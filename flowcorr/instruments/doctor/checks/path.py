"""The check of the steps outside the SDE window, which no log-prob covers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flowcorr.instruments.doctor.checks.timesteps import same
from flowcorr.instruments.doctor.exam import FACTOR_ERRORS, Exam, largest_gap
from flowcorr.instruments.doctor.findings import failed, judged, skipped
from flowcorr.instruments.doctor.trials import TRAINING_STEP
from flowcorr.instruments.finding import Finding
from flowcorr.instruments.gap_words import percent
from flowcorr.models import DTYPES, Schedule
from flowcorr.rollout.outside import LegName, Repeated, Velocity, repeat_outside
from flowcorr.rollout.precision import NO_GAP, coarse_weights
from flowcorr.rollout.questions import AFTER, BEFORE, BETWEEN, Question

# Medians over the samples, since a small error sends single images another way. Clean runs of the embedded model (bf16,
# fp8, int4, guidance) stay below 1 in errors of the window, and below 1.6 where one or two samples have the leg.
LARGEST = 2.5
# Share of a leg's way, of its initial noise, and of one of its steps that may be too much or too little; rounding to
# bfloat16 under guidance gives up to .003, .0001 and .03.
WAY, START, STEP = 0.006, 0.003, 0.15
FEWEST = 4  # samples whose factors have a spread
WORDS: Mapping[LegName, str] = {
    "before": "before the window",
    "between": "between its steps",
    "after": "after the window",
}
QUESTIONS: Mapping[LegName, Question] = {"before": BEFORE, "between": BETWEEN, "after": AFTER}


def check_path(exam: Exam) -> Finding:
    window, schedule = exam.trials.base.rollout.window, _schedule(exam)
    if not same(window.timesteps, window.timesteps.new_tensor(schedule.timesteps)[window.step_indices]):
        return skipped("the engine computes with other timesteps than the schedule's, see timesteps")
    unit = min(max(exam.trials.base.velocity_gap(), NO_GAP), largest_gap(exam.usual_gap))
    repeated = repeat_outside(
        exam.trials.base.rollout, exam.config, TRAINING_STEP, schedule, _few_at_a_time(exam)
    )
    legs = [leg for leg in repeated if leg.moves]
    if not legs:
        return skipped("no step lies outside the SDE window")
    largest, name = max((_median_gap(leg) / unit, leg.leg.name) for leg in legs)
    if largest <= LARGEST and not coarse_weights(exam.config):
        for leg in legs:
            found = _systematic(leg)
            if found is not None:
                text, factor, limit = found
                words, remedy = WORDS[leg.leg.name], QUESTIONS[leg.leg.name].remedy
                return failed(f"{text} {words}", remedy, value=abs(factor), limit=limit, leg=words)
    return judged(
        largest,
        LARGEST,
        "the steps outside the window lead where the actor's do",
        f"the steps {WORDS[name]} lead elsewhere: half of the samples that take them are more than {largest:.2g} "
        "errors of the window away",
        QUESTIONS[name].remedy,
        leg=WORDS[name] if largest > LARGEST else None,
    )


def _few_at_a_time(exam: Exam) -> Velocity:
    """The actor's velocity, of as many samples at a time as there are prompts: all together may not fit."""
    actor, rollout = exam.actor, exam.trials.base.rollout

    def velocity(latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
        parts = zip(*(of.split(exam.trials.num_prompts) for of in (latents, timesteps, rows)), strict=True)
        return torch.cat(
            [
                actor.velocity(rollout.select(chosen).sample_conditioning())(some, at)
                for some, at, chosen in parts
            ]
        )

    return velocity


def _median_gap(leg: Repeated) -> float:
    """Median over the samples that have steps in the leg: the gap as a share of the way."""
    has_steps = leg.leg.first < leg.leg.stop
    gap, way = (part[has_steps].flatten(1).norm(dim=1) for part in (leg.gap, leg.way))
    return float((gap / way).median())


def _schedule(exam: Exam) -> Schedule:
    """The schedule, with the timesteps that a transformer of the engine's dtype computes with."""
    return exam.actor.family.in_dtype(exam.trials.schedule, DTYPES[exam.config.rollout.dtype])


def _systematic(leg: Repeated) -> tuple[str, float, float] | None:
    """A fault that the gaps of all samples share, beside rounding: in words, its factor and its limit."""
    directions = [("of the way is too {} in the steps", leg.way, WAY)]
    directions += [
        (f"of step {index} is too {{}} in the steps", move, STEP)
        for index, move in leg.moves.items()
        if move.norm() >= leg.gap.norm()  # of a smaller step, rounding alone may be a multiple
    ]
    if leg.leg.name == "before":
        directions.insert(0, ("of the initial noise is too {} in the steps", leg.leg.begin, START))
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
