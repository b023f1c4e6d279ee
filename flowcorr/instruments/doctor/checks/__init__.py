"""All checks in order; each tests one explanation of the gap between rollout engine and actor.

An explanation is accepted if most of the gap disappears under it. So a check does not fail for the fault of another
part. A gap that no check explains fails the check `weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flowcorr.instruments.doctor.checks import (
    clip,
    guidance,
    images,
    log_probs,
    noise,
    path,
    prompts,
    timesteps,
    trajectory,
    weights,
)
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import Finding, skipped

Check = Callable[[Exam], Finding]

_TRAJECTORY = ("finite", "schedule", "latent_dtype", "transition", "log_probs", "bookkeeping")
_INPUTS = (*_TRAJECTORY, "timesteps", "embeddings", "guidance")
CHECKS: Sequence[tuple[str, Check, Sequence[str]]] = (
    ("finite", trajectory.check_finite, ()),
    ("schedule", trajectory.check_schedule, ("finite",)),
    ("window", trajectory.check_window, ("finite", "schedule")),
    ("latent_dtype", trajectory.check_latent_dtype, ("finite",)),
    ("transition", trajectory.check_transition, ("finite", "schedule")),
    ("log_probs", log_probs.check_log_probs, ("finite", "latent_dtype")),
    (
        "bookkeeping",
        log_probs.check_bookkeeping,
        ("finite", "schedule", "latent_dtype", "transition", "log_probs"),
    ),
    (
        "trajectory",
        trajectory.check_trajectory,
        ("finite", "window", "latent_dtype", "log_probs", "bookkeeping"),
    ),
    ("noise", noise.check_noise, ("finite", "latent_dtype", "log_probs", "bookkeeping")),
    ("determinism", noise.check_determinism, ("finite",)),
    (
        "seeds",
        noise.check_seeds,
        ("finite", "window", "latent_dtype", "log_probs", "bookkeeping", "noise", "determinism"),
    ),
    ("timesteps", timesteps.check_timesteps, _TRAJECTORY),
    ("embeddings", prompts.check_embeddings, (*_TRAJECTORY, "timesteps")),
    ("batch_shape", noise.check_batch_shape, ("finite", "determinism", "embeddings")),
    ("guidance", guidance.check_guidance, (*_TRAJECTORY, "timesteps", "embeddings")),
    ("sync", weights.check_sync, _INPUTS),
    ("weights", weights.check_weights, (*_INPUTS, "sync")),
    ("lora", weights.check_lora, (*_INPUTS, "sync", "weights")),
    ("attention", weights.check_attention, (*_INPUTS, "sync", "weights", "lora")),
    ("path", path.check_path, (*_INPUTS, "window", "trajectory", "noise", "sync", "weights", "lora")),
    ("images", images.check_images, ("finite",)),
    ("clip", clip.check_clip, (*_INPUTS, "sync", "weights", "lora")),
)
"""Name, check, and the checks whose failure makes its result meaningless; in the order of execution."""


def run_checks(exam: Exam) -> list[Finding]:
    """All findings in the order of `CHECKS`; a check is skipped if one that it depends on failed."""
    findings: list[Finding] = []
    failed: set[str] = set()
    for name, check, blockers in CHECKS:
        causes = [blocker for blocker in blockers if blocker in failed]
        finding = skipped(f"not judged, because {causes[0]} fails") if causes else check(exam)
        findings.append(replace(finding, check=name))
        if finding.status == "FAIL":
            failed.add(name)
    return findings
