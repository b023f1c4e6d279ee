"""All checks in order: of trials of the engine at hand, of captured samples of another trainer, or of both.

Each tests one explanation of the gap between rollout engine and actor. An explanation is accepted if most of the gap
disappears under it. So a check does not fail for the fault of another part. A gap that no check explains fails the
check `weights`; of captured samples, it warns at the legs that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.checks import (
    advantages,
    clip,
    guidance,
    images,
    log_probs,
    noise,
    path,
    prompts,
    replay,
    reward,
    schedule,
    timesteps,
    trajectory,
    weights,
)
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import of_check, skipped
from flowcorr.instruments.finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question, with a function that answers it for trials and one for captured samples.

    Attributes:
        name: of the check, and the cause of its findings unless they name another.
        trials: examines trials of the engine at hand.
        captured: examines captured samples; it may find nothing to look at.
        blockers: checks whose failure makes the result on trials meaningless. Captured samples are replayed with what
            was captured, so that none of their checks upsets another.
        causes: what each cause that it names of captured samples means.
    """

    name: str
    trials: Callable[[Exam], Finding] | None = None
    captured: Callable[[Captured], Finding | None] | None = None
    blockers: Sequence[str] = ()
    causes: Mapping[str, str] = field(default_factory=dict)


_TRAJECTORY = ("finite", "schedule", "latent_dtype", "transition", "log_probs", "bookkeeping")
_INPUTS = (*_TRAJECTORY, "timesteps", "embeddings", "guidance")
CHECKS: Sequence[Check] = (
    Check(name="finite", trials=trajectory.check_finite),
    Check(
        name="schedule",
        trials=trajectory.check_schedule,
        captured=schedule.check_captured_schedule,
        blockers=("finite",),
        causes={
            "wrong_shift": "the sigmas are those of the model's scheduler with another shift",
            "other_schedule": "the sigmas are not those of the model's own scheduler",
            "timesteps": "the timesteps are not those of the model's own scheduler",
            "rounded_sigmas": "the table of sigmas is in half precision",
            "rounded_timesteps": "the transformer was fed timesteps in half precision",
        },
    ),
    Check(name="window", trials=trajectory.check_window, blockers=("finite", "schedule")),
    Check(name="latent_dtype", trials=trajectory.check_latent_dtype, blockers=("finite",)),
    Check(name="transition", trials=trajectory.check_transition, blockers=("finite", "schedule")),
    Check(name="before", captured=replay.check_before),
    Check(
        name="log_probs",
        trials=log_probs.check_log_probs,
        captured=log_probs.check_captured_log_probs,
        blockers=("finite", "latent_dtype"),
        causes={
            "log_probs_summed": "log-probs are sums over the latent, where means are expected",
            "log_probs_normaliser": "log-probs lack `- log s` or `- log(2 pi) / 2`, and the trainer's have it",
            "log_probs_unscaled": "log-probs lack the factor `1 / (2 s^2)`",
        },
    ),
    Check(name="between", captured=replay.check_between),
    Check(name="after", captured=replay.check_after),
    Check(
        name="bookkeeping",
        trials=log_probs.check_bookkeeping,
        blockers=("finite", "schedule", "latent_dtype", "transition", "log_probs"),
    ),
    Check(
        name="trajectory",
        trials=trajectory.check_trajectory,
        blockers=("finite", "window", "latent_dtype", "log_probs", "bookkeeping"),
    ),
    Check(
        name="noise",
        trials=noise.check_noise,
        captured=noise.check_captured_noise,
        blockers=("finite", "latent_dtype", "log_probs", "bookkeeping"),
        causes={
            "noise_reused": "noise was drawn twice",
            "noise_scale": "noise is not standard normal",
        },
    ),
    Check(name="determinism", trials=noise.check_determinism, blockers=("finite",)),
    Check(
        name="seeds",
        trials=noise.check_seeds,
        blockers=("finite", "window", "latent_dtype", "log_probs", "bookkeeping", "noise", "determinism"),
    ),
    Check(name="timesteps", trials=timesteps.check_timesteps, blockers=_TRAJECTORY),
    Check(
        name="embeddings",
        trials=prompts.check_embeddings,
        captured=replay.check_embeddings,
        blockers=(*_TRAJECTORY, "timesteps"),
        causes={
            "wrong_prompt": "the engine took the embeddings of other samples, or of an earlier batch",
            "sequence_length": "prompts are cut or padded to another length",
        },
    ),
    Check(
        name="batch_shape",
        trials=noise.check_batch_shape,
        blockers=("finite", "determinism", "embeddings"),
    ),
    Check(
        name="guidance",
        trials=guidance.check_guidance,
        captured=replay.check_guidance,
        blockers=(*_TRAJECTORY, "timesteps", "embeddings"),
        causes={
            "guidance_off": "the engine took no guidance",
            "negative_prompt": "the engine took an empty negative prompt",
        },
    ),
    Check(name="sync", trials=weights.check_sync, blockers=_INPUTS),
    Check(name="weights", trials=weights.check_weights, blockers=(*_INPUTS, "sync")),
    Check(
        name="lora",
        trials=weights.check_lora,
        captured=replay.check_lora,
        blockers=(*_INPUTS, "sync", "weights"),
        causes={
            "adapter_not_applied": "the engine sampled with the base model",
        },
    ),
    Check(name="attention", trials=weights.check_attention, blockers=(*_INPUTS, "sync", "weights", "lora")),
    Check(
        name="path",
        trials=path.check_path,
        blockers=(*_INPUTS, "window", "trajectory", "noise", "sync", "weights", "lora"),
    ),
    Check(
        name="images",
        trials=images.check_images,
        captured=images.check_captured_images,
        blockers=("finite",),
        causes={
            "swapped_images": "images and latents of different samples are paired",
            "images_of_step_before": "images and latents of different training steps are paired",
            "decoder_unscaled": "the decoder lacks its scaling factor or its shift",
            "channels_reversed": "red and blue of the images are exchanged",
            "flipped_images": "the images are upside down",
        },
    ),
    Check(name="reward", captured=reward.check_captured_reward),
    Check(
        name="advantages",
        captured=advantages.check_captured_advantages,
        causes={
            "advantages_not_centred": "advantages have a mean far from 0, so all samples are pushed one way",
        },
    ),
    Check(name="clip", trials=clip.check_clip, blockers=(*_INPUTS, "sync", "weights", "lora")),
)
"""In the order of execution."""
CAUSES = {cause: meaning for check in CHECKS for cause, meaning in check.causes.items()}
"""What each cause means that a check of captured samples names; that of another finding is its check."""


def run_checks(samples: Exam | Captured) -> list[Finding]:
    """All findings in the order of `CHECKS`; a check is skipped if one that it depends on failed."""
    findings: list[Finding] = []
    failed: set[str] = set()
    for check in CHECKS:
        examine: Callable[[Any], Finding | None] | None = (
            check.captured if isinstance(samples, Captured) else check.trials
        )
        if examine is None:
            continue
        causes = [] if isinstance(samples, Captured) else [name for name in check.blockers if name in failed]
        finding = skipped(f"not judged, because {causes[0]} fails") if causes else examine(samples)
        if finding is None:
            continue
        assert finding.cause in ("", check.name, *CAUSES), "every cause has its meaning in the table"
        findings.append(of_check(check.name, finding))
        if finding.level == "serious":
            failed.add(check.name)
    return findings
