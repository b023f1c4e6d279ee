"""The check of the timesteps that the engine's model gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flowcorr.diagnostics.doctor.checks.trajectory import places
from flowcorr.diagnostics.doctor.exam import Exam
from flowcorr.diagnostics.doctor.findings import Finding, failed, passed, warned
from flowcorr.diagnostics.doctor.trials import score_means
from flowcorr.rollout.precision import NO_GAP

REPLAY = "the actor uses Rollout.timesteps; a training loop of your own must do the same"
FEED = (
    "feed the model its own scheduler's timesteps, in float32, and return exactly these as Rollout.timesteps"
)
SAME_SHARE = 1e-3  # of the gap: two explanations that differ by less cannot be told apart
Change = Callable[[Tensor], Tensor]
ROUNDINGS: Mapping[str, Change] = {
    "rounded to bfloat16": lambda timesteps: timesteps.to(torch.bfloat16).float(),
    "rounded to bfloat16 after a division by 1000": lambda timesteps: (
        (timesteps / 1000).to(torch.bfloat16).float() * 1000
    ),
    "rounded to float16": lambda timesteps: timesteps.to(torch.float16).float(),
}
MISTAKES: Mapping[str, Change] = {
    "truncated to integers": torch.trunc,
    "rounded to integers": torch.round,
    "divided by 1000": lambda timesteps: timesteps / 1000,
    "times 1000": lambda timesteps: timesteps * 1000,
}


def check_timesteps(exam: Exam) -> Finding:
    """Whether the engine's model gets the schedule's timesteps, and returns them."""
    rollout = exam.trials.base.rollout
    table = torch.tensor(exam.trials.schedule.timesteps, device=rollout.window.timesteps.device)
    expected, fed = table[places(exam)], rollout.window.timesteps.float()
    gap = float((fed - expected).abs().max())
    if not gap:
        return _unreturned(exam, expected) or passed("the model gets the schedule's timesteps")
    names = [name for name, change in {**ROUNDINGS, **MISTAKES}.items() if torch.equal(fed, change(expected))]
    if names:
        message = f"the engine's timesteps are {' or '.join(names)}, and differ by up to {gap:.3g}"
        roundings = ROUNDINGS.keys() & names
        if len(roundings) == len(names) or (roundings and exam.config.rollout.dtype != "float32"):
            return _unreturned(exam, fed) or warned(message, REPLAY, value=gap, threshold=0.0)
        return failed(message, FEED, value=gap, threshold=0.0)
    message = f"timesteps differ from the schedule's by up to {gap:.3g}, more than rounding explains"
    return failed(message, FEED, value=gap, threshold=0.0)


def _unreturned(exam: Exam, expected: Tensor) -> Finding | None:
    """A finding if the engine's steps fit changed ones of the `expected` timesteps better than the returned ones."""
    trial = exam.trials.base
    if trial.velocity_gap() <= NO_GAP:
        return None
    found = []
    for name, change in {**ROUNDINGS, **MISTAKES}.items():
        changed = change(expected)
        if torch.equal(changed, trial.rollout.window.timesteps):
            continue
        window = replace(trial.rollout.window, timesteps=changed)
        fit = trial.fit(score_means(exam.actor, replace(trial.rollout, window=window)))
        if (evidence := exam.evidence(trial, fit)) is not None:
            found.append((fit.share, name, evidence))
    if not found:
        return None
    best, _, evidence = max(found, key=lambda entry: entry[0])
    names = [name for share, name, _ in found if share > best - SAME_SHARE]
    message = f"the steps fit timesteps {' or '.join(names)}, {evidence.text}; it returns different ones"
    warns = ROUNDINGS.keys() & names and exam.config.rollout.dtype == "bfloat16"
    report = warned if warns else failed
    return report(message, FEED, value=evidence.value, threshold=evidence.threshold)
