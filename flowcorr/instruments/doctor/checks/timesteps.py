"""The check of the timesteps that the engine's model gets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.candidates import Candidate, best
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import failed, passed, warned
from flowcorr.instruments.doctor.mistakes import OTHER_TIMESTEPS
from flowcorr.instruments.doctor.other_inputs import Means, explaining
from flowcorr.instruments.doctor.trials import Trial, score_means
from flowcorr.models import DTYPES
from flowcorr.rollout.precision import NO_GAP

REPLAY = "the actor uses Rollout.timesteps; a training loop of your own must do the same"
FEED = (
    "feed the model its own scheduler's timesteps, in float32, and return exactly these as Rollout.timesteps"
)
FLOAT32 = 1e-6  # relative: tables made in float32 in another order of operations
SAME_SHARE = 1e-3  # of the gap: two explanations that differ by less cannot be told apart


def check_timesteps(exam: Exam) -> Finding:
    rows, dtype = exam.trials.base.places, exam.config.rollout.dtype
    fed, exact = exam.trials.base.rollout.window.timesteps.float(), _exact(exam)
    gap = float((fed - exact[rows]).abs().max())
    if same(fed, exact[rows]):
        return _unreturned(exam, fed) or passed("the model gets the schedule's timesteps")
    rounded = _rounded(exam)
    tables = {**rounded, **{name: change(exact) for name, change in OTHER_TIMESTEPS.items()}}
    names = [name for name, table in tables.items() if same(fed, table[rows])]
    if _as_computed_in(dtype) in names:
        message = f"the model gets the schedule's timesteps, {_as_computed_in(dtype)}: up to {gap:.3g} away; {REPLAY}"
        return _unreturned(exam, fed) or passed(message)
    if not names:
        message = f"timesteps differ from the schedule's by up to {gap:.3g}, more than rounding explains"
        return failed(message, FEED, value=gap, limit=0.0, fits=[])
    message = f"the engine's timesteps are {' or '.join(names)}, and differ by up to {gap:.3g}"
    roundings = rounded.keys() & names
    if len(roundings) == len(names) or (roundings and dtype != "float32"):
        return _unreturned(exam, fed) or warned(message, REPLAY, value=gap, limit=0.0, fits=names)
    return failed(message, FEED, value=gap, limit=0.0, fits=names)


def _unreturned(exam: Exam, returned: Tensor) -> Finding | None:
    """A finding if the engine's steps fit other timesteps than the `returned` ones better."""
    trial = exam.trials.base
    if trial.velocity_gap() <= NO_GAP:
        return None
    rounded = {name: table[exam.trials.base.places] for name, table in _rounded(exam).items()}
    changed = {**rounded, **{name: change(returned) for name, change in OTHER_TIMESTEPS.items()}}
    tables = {name: timesteps for name, timesteps in changed.items() if not same(timesteps, returned)}
    tried = explaining(exam, trial, [_fed(exam, trial, *table) for table in tables.items()])
    first = best(tried)
    if first is None or first.evidence is None:
        return None
    evidence = first.evidence
    names = [one.candidate.message for one in tried if one.explains and one.left < first.left + SAME_SHARE]
    message = f"the steps fit timesteps {' or '.join(names)}, {evidence.text}; it returns different ones"
    warns = rounded.keys() & names and exam.config.rollout.dtype != "float32"
    report = warned if warns else failed
    return report(message, FEED, value=evidence.value, limit=evidence.threshold, fits=names)


def _fed(exam: Exam, trial: Trial, name: str, timesteps: Tensor) -> Candidate[Means]:
    window = replace(trial.rollout.window, timesteps=timesteps)
    means = partial(score_means, exam.actor, replace(trial.rollout, window=window))
    return Candidate(cause="timesteps", message=name, inputs=(means,))


def _exact(exam: Exam) -> Tensor:
    """The timesteps `[N]` of the actor's own schedule."""
    return torch.tensor(
        exam.trials.base.schedule.timesteps, device=exam.trials.base.rollout.window.timesteps.device
    )


def _rounded(exam: Exam) -> dict[str, Tensor]:
    """Tables `[N]` of rounded timesteps: as the family's transformer rounds them, and as plain casts."""
    exact, family = _exact(exam), exam.actor.family
    computed = {
        _as_computed_in(name): exact.new_tensor(family.in_dtype(exam.trials.base.schedule, dtype).timesteps)
        for name, dtype in DTYPES.items()
    }
    halves = ("bfloat16", "float16")
    return {**{f"rounded to {name}": exact.to(DTYPES[name]).float() for name in halves}, **computed}


def _as_computed_in(dtype: str) -> str:
    return f"as a transformer in {dtype} computes with them"


def same(timesteps: Tensor, others: Tensor) -> bool:
    """Whether two tables of timesteps differ by no more than the order of float32 operations that made them."""
    return torch.allclose(timesteps, others, rtol=FLOAT32, atol=0)
