"""The check of the steps outside the SDE window, which no log-prob covers."""

from __future__ import annotations

from collections.abc import Mapping

from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.checks.timesteps import same
from flowcorr.instruments.doctor.exam import FACTOR_ERRORS, Exam
from flowcorr.instruments.doctor.findings import failed, judged, skipped
from flowcorr.instruments.gap_words import percent
from flowcorr.models import DTYPES
from flowcorr.questions.compared import velocity_gaps
from flowcorr.questions.legs import LegName, Repeated, errors_by_leg
from flowcorr.questions.outside import repeat_outside, window_units
from flowcorr.questions.question import OUTSIDE
from flowcorr.questions.residual_terms import share
from flowcorr.rollout.precision import coarse_weights

# Share of a leg's way, of its initial noise, and of one of its steps that may be too much or too little; rounding to
# bfloat16 under guidance gives up to .003, .0001 and .03.
WAY, START, STEP = 0.006, 0.003, 0.15
FEWEST = 4  # samples whose factors have a spread
WORDS: Mapping[LegName, str] = {
    "before": "before the window",
    "between": "between its steps",
    "after": "after the window",
}


def check_path(exam: Exam) -> Finding:
    trial = exam.trials.base
    fed = trial.actor.family.in_dtype(trial.schedule, DTYPES[exam.config.rollout.dtype]).timesteps
    timesteps, indices = trial.rollout.window.timesteps, trial.rollout.window.step_indices
    if not same(timesteps, timesteps.new_tensor(fed)[indices]):
        return skipped("the engine computes with other timesteps than the schedule's, see timesteps")
    legs = [leg for leg in repeat_outside(trial) if leg.moves]
    if not legs:
        return skipped("no step lies outside the SDE window")
    unit = window_units(velocity_gaps(trial.engine_means, trial.means, trial.still), exam.usual_gap)
    means = {
        name: float(errors.sum() / unit[rows].sum()) for name, (errors, rows) in errors_by_leg(legs).items()
    }
    name = max(means, key=lambda name: means[name] / OUTSIDE[name].limit)
    limit = OUTSIDE[name].limit
    if means[name] <= limit and not coarse_weights(exam.config):
        for leg in legs:
            systematic = _systematic(leg)
            if systematic is not None:
                text, factor, largest = systematic
                words, remedy = WORDS[leg.leg.name], OUTSIDE[leg.leg.name].remedy
                return failed(f"{text} {words}", remedy, value=abs(factor), limit=largest, leg=words)
    return judged(
        means[name],
        limit,
        "the steps outside the window lead where the actor's do",
        f"the steps {WORDS[name]} lead elsewhere: {means[name]:.2g} errors of the window away in the mean",
        OUTSIDE[name].remedy,
        leg=WORDS[name] if means[name] > limit else None,
    )


def _systematic(leg: Repeated) -> tuple[str, float, float] | None:
    """A systematic fault that the gaps of all samples share: in words, with its factor and its limit."""
    directions = [("of the way is too {} in the steps", leg.way, WAY)]
    directions += [
        (f"of step {index} is too {{}} in the steps", move, STEP)
        for index, move in leg.moves.items()
        if move.norm() >= leg.gap.norm()  # of a smaller step, rounding alone may be a multiple
    ]
    if leg.leg.name == "before":
        directions.insert(0, ("of the initial noise is too {} in the steps", leg.leg.begin, START))
    for text, direction, limit in directions:
        taken = direction.flatten(1).any(1)
        factors = share(leg.gap[taken], direction[taken])
        factor = factors.median()
        error = (
            1.86 * (factors - factor).abs().median() / len(factors) ** 0.5
        )  # of the median of normal factors
        if abs(factor) > limit and abs(factor) > FACTOR_ERRORS * error and len(factors) >= FEWEST:
            part = percent(abs(float(factor)))
            return f"{part} {text.format('much' if factor > 0 else 'little')}", float(factor), limit
    return None
