"""The functions that answer the questions of the checks, and their run over samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flowcorr.health.finding import LEVELS, Finding
from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.checks import CAUSES, CHECKS
from flowcorr.instruments.doctor.checks.adapter import check_adapter
from flowcorr.instruments.doctor.checks.advantages import check_captured_advantages
from flowcorr.instruments.doctor.checks.clip import check_clip
from flowcorr.instruments.doctor.checks.guidance import check_guidance
from flowcorr.instruments.doctor.checks.images import check_captured_images, check_images
from flowcorr.instruments.doctor.checks.log_probs import (
    check_bookkeeping,
    check_captured_log_probs,
    check_log_probs,
)
from flowcorr.instruments.doctor.checks.noise import (
    check_batch_shape,
    check_captured_latents,
    check_captured_noise,
    check_determinism,
    check_noise,
    check_seeds,
)
from flowcorr.instruments.doctor.checks.path import check_path
from flowcorr.instruments.doctor.checks.prompts import check_embeddings, check_references
from flowcorr.instruments.doctor.checks.reward import check_captured_reward
from flowcorr.instruments.doctor.checks.schedule import check_captured_schedule
from flowcorr.instruments.doctor.checks.timesteps import check_timesteps
from flowcorr.instruments.doctor.checks.trajectory import (
    check_finite,
    check_samples,
    check_schedule,
    check_window,
)
from flowcorr.instruments.doctor.checks.weights import check_attention, check_lora, check_sync, check_weights
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import judged, of_check, skipped
from flowcorr.metrics import Metrics
from flowcorr.questions.ask import ask
from flowcorr.questions.question import (
    LATENTS,
    LOG_PROBS,
    OF_ROLLOUTS,
    STDS,
    TRAJECTORIES,
    WINDOWS,
    Question,
    own_questions,
)


def _of_question(question: Question) -> Callable[[Exam], Finding]:
    """A check that asks the question of both trials, as a training step asks it of its batch."""

    def check(exam: Exam) -> Finding:
        answers = [ask(trial, [question]) for trial in (exam.trials.base, exam.trials.moved)]
        value = Metrics(*answers).compute().get(question.logged_as)
        if value is None:
            return skipped(f"cannot tell the {question.what}: the engine returns too little")
        message = f"the {question.what} is {value:.3g}"
        return judged(value, question.limit, message, message, question.remedy)

    return check


_PLACED = (WINDOWS, LATENTS, STDS, LOG_PROBS, TRAJECTORIES)
"""The questions that have a place among the checks; others are asked after them."""
OF_TRIALS: Mapping[str, Callable[[Exam], Finding | None]] = {
    "adapter": check_adapter,
    "finite": check_finite,
    "schedule": check_schedule,
    "samples": check_samples,
    "window": check_window,
    "latent_dtype": _of_question(LATENTS),
    "transition": _of_question(STDS),
    "log_probs": check_log_probs,
    "bookkeeping": check_bookkeeping,
    "trajectory": _of_question(TRAJECTORIES),
    "noise": check_noise,
    "determinism": check_determinism,
    "seeds": check_seeds,
    "timesteps": check_timesteps,
    "embeddings": check_embeddings,
    "references": check_references,
    "guidance": check_guidance,
    "batch_shape": check_batch_shape,
    "sync": check_sync,
    "weights": check_weights,
    "lora": check_lora,
    "attention": check_attention,
    "path": check_path,
    "images": check_images,
    "clip": check_clip,
}
OF_CAPTURED: Mapping[str, Callable[[Captured], Finding | None]] = {
    "schedule": check_captured_schedule,
    "latent_dtype": check_captured_latents,
    "log_probs": check_captured_log_probs,
    "noise": check_captured_noise,
    "images": check_captured_images,
    "trainer": lambda captured: captured.trained,
    "reward": check_captured_reward,
    "advantages": check_captured_advantages,
}
"""By check; a function returns None where it found nothing to look at. The replay has findings of the other checks."""


def check_trials(exam: Exam) -> dict[str, Finding]:
    """The findings by check, in the order of `CHECKS`; a check is skipped if one that it depends on failed."""
    findings: dict[str, Finding] = {}
    failed: set[str] = set()
    for check in CHECKS:
        if check.name not in OF_TRIALS:
            continue
        blocker = next((name for name in check.blockers if name in failed), None)
        if blocker is not None:
            findings[check.name] = of_check(check.name, skipped(f"not judged, because {blocker} fails"))
        elif (finding := OF_TRIALS[check.name](exam)) is not None:
            findings[check.name] = _named(check.name, finding)
            failed |= {check.name} if finding.level == "serious" else set()
    others = [question for question in OF_ROLLOUTS if question not in _PLACED]
    for question in (*others, *own_questions(exam.config)):
        findings[question.name] = of_check(question.name, _of_question(question)(exam))
    return findings


def check_captured(captured: Captured) -> dict[str, Finding]:
    """The findings by check, in the order of `CHECKS`.

    The replay examines all legs and inputs together. Where a check of the captured values and the replay both have a
    finding, it is the worse one; of equal ones the check's, since the replay infers its own. Two faults of different
    causes are both told.
    """
    findings: dict[str, Finding] = {}
    for check in CHECKS:
        own = OF_CAPTURED[check.name](captured) if check.name in OF_CAPTURED else None
        replayed = captured.replayed.get(check.name)
        both = [finding for finding in (own, replayed) if finding is not None]
        if both:
            worst = min(both, key=lambda finding: LEVELS.index(finding.level))
            findings[check.name] = _named(check.name, worst)
        faults = {finding.cause: finding for finding in both if finding.level == "serious"}
        if len(faults) == 2 and replayed is not None:
            findings[f"{check.name} of the replay"] = _named(check.name, replayed)
    return findings


def _named(check: str, finding: Finding) -> Finding:
    assert finding.cause in ("", check, *CAUSES), "every cause has its meaning in the table"
    return of_check(check, finding)
