"""The check of guidance: finds the guidance scale that fits the engine's steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.candidates import Candidate, best
from flowcorr.instruments.doctor.checks.prompts import REMEDIES, explained, lies_with
from flowcorr.instruments.doctor.exam import EXPLAINED, FACTOR_ERRORS, Exam
from flowcorr.instruments.doctor.findings import failed, passed
from flowcorr.instruments.doctor.other_inputs import Means, explaining
from flowcorr.instruments.doctor.trials import NEGATIVE, Fit, score_means
from flowcorr.rollout.precision import NO_GAP, coarse_weights
from flowcorr.sde.transition import over_elements

# Like EXPLAINED, for guidance that is off in a quantized engine: this explains about 0.45 of an fp8 engine's gap on a
# random model with weak guidance. Precision alone stays below; another checkpoint does not, and has `weights`.
UNGUIDED = 0.3
PUSH = 0.2  # missing share of the effect of guidance; precision alone causes up to 0.05
# Tried if guidance is an input of the model, so that its effect is not linear in the scale.
USUAL_SCALES = (0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 7.0, 7.5, 10.0)
REMEDY = "pass sampling.{key} and the negative prompt to the engine; a scale of 1 means that guidance is off"
DISTILLED = "pass sampling.{key} to the engine, whose transformer takes it as an input"


def check_guidance(exam: Exam) -> Finding:
    actor, key = exam.actor, exam.actor.family.guidance_key
    configured = getattr(exam.config.sampling, key)
    if configured <= 1 and not actor.family.distills_guidance:
        return passed("guidance is off")
    if exam.trials.base.velocity_gap() <= NO_GAP:
        return passed(f"both sides use {key}={configured:g}")
    if (finding := explained(exam, "guidance")) is not None:
        return finding
    check = _distilled if actor.family.distills_guidance else _linear
    finding = check(exam, key, configured)
    if finding.level == "serious":
        return finding
    inputs = "guidance: another negative prompt, such as an empty one, or another rule of guidance"
    return lies_with(exam, NEGATIVE, inputs, REMEDIES["guidance"]) or finding


def _distilled(exam: Exam, key: str, configured: float) -> Finding:
    """Try the usual scales: guidance is an input of the transformer."""
    rows: list[Candidate[Means]] = [
        Candidate(
            cause="guidance",
            message=f"{key}={scale:.3g} instead of {configured:g}",
            numbers={"value": scale},
            inputs=(partial(_guided, exam, key, scale),),
        )
        for scale in USUAL_SCALES
        if scale != configured
    ]
    fitting = best(explaining(exam, exam.trials.base, rows))
    if fitting is None or fitting.evidence is None:
        return passed(f"no usual {key} fits the steps better than {configured:g}")
    message = f"the steps fit {fitting.candidate.message}, {fitting.evidence.text}"
    return failed(message, DISTILLED.format(key=key), limit=configured, **fitting.candidate.numbers)


def _linear(exam: Exam, key: str, configured: float) -> Finding:
    """Fit the scale, in which the means are linear, and then the rescaling of guidance to the unguided std."""
    trial = exam.trials.base
    plain = _guided(exam, key, 1.0)
    scale = trial.fit(plain)
    fitted = 1 + (configured - 1) * (1 - scale.factor)
    velocity = trial.means - trial.still  # up to a factor of the step, which cancels
    ratio = _std(plain - trial.still) / _std(velocity)
    rescaled = trial.fit(trial.still + over_elements(ratio, velocity) * velocity)
    # A number outside of its own range is no explanation. One factor on all velocities shares most of `rescaled`.
    shares = [
        scale.share if fitted >= -PUSH * (configured - 1) else 0.0,
        rescaled.share if 0 < rescaled.factor <= 1 + PUSH else 0.0,
    ]
    error = (configured - 1) * (scale.error + scale.by_rounding)
    fits = passed(f"the steps fit {key}={fitted:.3g} +- {error:.2g}")
    by_length = trial.fit(trial.still).share
    if by_length > max(shares):
        explained = by_length >= EXPLAINED
        return (
            passed("one factor on all velocities explains the gap better, see weights") if explained else fits
        )
    if shares[1] > shares[0] and _acts(exam, rescaled):
        return failed(
            f"the steps fit guidance_rescale={rescaled.factor:.2g}, which is {100 * rescaled.share:.0f} % of the gap",
            "turn guidance_rescale off in the engine, since flowcorr does not rescale guidance",
            value=rescaled.share,
            limit=EXPLAINED,
            guidance_rescale=rescaled.factor,
        )
    unguided = coarse_weights(exam.config) and trial.explained_by([plain]) >= UNGUIDED
    if (shares[0] and _acts(exam, scale, by_rounding=scale.by_rounding)) or unguided:
        return failed(
            f"the steps fit {key}={fitted:.3g} instead of {configured:g}, which is {100 * scale.share:.0f} % of the "
            "gap",
            REMEDY.format(key=key),
            value=fitted,
            limit=configured,
        )
    return fits


def _acts(exam: Exam, fit: Fit, *, by_rounding: float = 0.0) -> bool:
    """Whether a change of guidance explains the gap, or at least all of it but rounding."""
    significant = abs(fit.factor) >= max(PUSH, by_rounding + FACTOR_ERRORS * fit.error)
    return fit.share >= EXPLAINED or (significant and exam.leaves_rounding(exam.trials.base, fit))


def _std(velocity: Tensor) -> Tensor:
    """`[B, T]`, std over the latent elements."""
    return velocity.flatten(2).std(2)


def _guided(exam: Exam, key: str, scale: float) -> Tensor:
    """The actor's step means `[B, T, *L]` of the base trial at another guidance scale, as the engine would have it."""
    changed: dict[str, Any] = {key: scale}
    guidance = exam.actor.scorer.guidance_of(replace(exam.config.sampling, **changed))
    return score_means(exam.actor, exam.trials.base.rollout, guidance=guidance)
