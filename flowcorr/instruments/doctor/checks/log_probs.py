"""Checks of log-probs: against the engine's own step means, against the actor's, and against a replay."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from flowcorr import dumps, sde
from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.conventions import CONVENTIONS
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import failed, judged, passed
from flowcorr.instruments.faults import diagnose
from flowcorr.instruments.steps import gap_of
from flowcorr.questions.compared import log_prob_errors
from flowcorr.questions.question import ERRORS, LOG_PROBS
from flowcorr.sde.transition import mean_over_elements

LOG_PROB_ROUNDING = 2e-6  # relative above 1: two float32 means of the same numbers differ by 1.2e-7


def check_log_probs(exam: Exam) -> Finding:
    trial = exam.trials.base
    log_probs, unscaled = trial.rollout.log_probs, exam.config.sampling.cps_unscaled
    gap = float(
        log_prob_errors(trial.rollout, trial.engine_noise, trial.engine_stds, cps_unscaled=unscaled).max()
    )
    if gap > LOG_PROBS.limit and _fits_actor(exam):
        return passed("log-probs agree with the actor's, but not with the returned means: see bookkeeping")
    convention = _convention(exam, log_probs) if gap > LOG_PROBS.limit else None
    what = (
        f"are {convention}" if convention else "do not follow from the returned latents, step means and stds"
    )
    return judged(
        gap,
        LOG_PROBS.limit,
        "log-probs are mean-pooled, normalised and float32",
        f"log-probs {what}: off by up to {gap:.2g}",
        LOG_PROBS.remedy,
        convention=convention,
    )


def check_bookkeeping(exam: Exam) -> Finding:
    trial = exam.trials.base
    squared, delta = trial.squared_distance().double(), (trial.log_probs - trial.rollout.log_probs).double()
    # Log-probs have a rounding error of their own.
    rounding = LOG_PROB_ROUNDING * trial.log_probs.abs().double().clamp(min=1)
    if exam.config.sampling.cps_unscaled:  # log-probs are in units of 2 s^2 nats
        unit = 2 * trial.stds.double().square()
        delta, rounding = delta / unit, rounding / unit
    excess = ((delta + squared / 2).abs() - rounding).clamp(min=0)
    z = float((excess * math.sqrt(trial.rollout.num_elements) / squared.sqrt().clamp(min=1e-12)).max())
    return judged(
        z,
        ERRORS,
        f"log-probs differ as the step means do (|z| up to {z:.2f})",
        f"log-probs differ by {z:.3g} standard deviations from what the step means explain",
        "return the latents, means and sigmas that were scored; precision does not explain this",
    )


def _convention(exam: Exam, log_probs: Tensor) -> str | None:
    """The name of the convention that gives these log-probs; None if no usual one does."""
    trial = exam.trials.base
    square = mean_over_elements(trial.engine_noise.square(), 2)
    for convention in CONVENTIONS:
        values = convention.of(
            square, trial.engine_stds, trial.rollout.window.step_sizes, trial.rollout.num_elements
        )
        if torch.allclose(log_probs, values, rtol=1e-4, atol=LOG_PROBS.limit):
            return convention.name
    return "rounded to bfloat16" if torch.equal(log_probs, log_probs.to(torch.bfloat16).float()) else None


def _fits_actor(exam: Exam) -> bool:
    """Whether the engine's log-probs are closer to the actor's than to the ones that the returned means give."""
    trial, window = exam.trials.base, exam.trials.base.rollout.window
    step = sde.Transition(trial.engine_means, trial.engine_stds, window.step_sizes)
    by_means = sde.log_prob(window.next_latents, step, cps_unscaled=exam.config.sampling.cps_unscaled)
    gap_to_actor, gap_to_means = (
        (log_probs - trial.rollout.log_probs).abs().max() for log_probs in (trial.log_probs, by_means)
    )
    return bool(gap_to_actor < gap_to_means / 2)


def check_captured_log_probs(captured: Captured) -> Finding | None:
    """The finding on the convention of log-probs; None for the expected one."""
    convention, terms = captured.legs.convention, captured.terms.get(captured.step)
    replayed = captured.replayed.get("log_probs")
    if convention is None or not convention.cause:
        return None
    if replayed is not None and replayed.level == "serious":  # other inputs, under which some fit by chance
        return None
    differ = "where means of a density are expected; no other convention is as close to the replay"
    if convention.cause == "log_probs_normaliser":
        shift = "" if terms is None else _shared_shift(terms, captured.step)
        if not shift:
            return passed(f"they are {convention.name}, which cancels in every ratio of two that lack it")
        differ = f"and the trainer's are not; {shift}"
    return failed(f"they are {convention.name}, {differ}", convention.remedy, cause=convention.cause)


def _shared_shift(terms: Path, step: int) -> str:
    """A shift of the trainer's log-probs from the engine's that all samples share, in words; empty if none."""
    faults = diagnose({step: gap_of(dumps.load(terms))})
    return next((fault.evidence for fault in faults if fault.cause in ("shared_shift", "one_step")), "")
