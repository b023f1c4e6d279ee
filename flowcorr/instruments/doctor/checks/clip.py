"""The check of the clip range, and the gap by step under the current weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flowcorr.health.finding import Finding
from flowcorr.health.setting import Setting, clip_key, clip_text
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import judged, passed
from flowcorr.instruments.gap_table import Gap, step_table
from flowcorr.instruments.outcome import Table
from flowcorr.losses import loss_of
from flowcorr.records import Terms

CLIP_SHARE = 0.1


def check_clip(exam: Exam) -> Finding:
    config = exam.config
    correction = config.algorithm.rollout_correction
    if correction.mode in ("off", "decoupled"):
        return passed("ratios are relative to recomputed log-probs, so this gap is not in them")
    if correction.mode == "auto":
        return passed(
            "old log-probs are recomputed wherever this gap leaves the clip range (bypass_mode=auto)"
        )
    if loss_of(config.actor, correction).ratio_limit(config.actor) is None:
        return passed("the loss does not clip")
    share = _gap(exam).outside()
    assert share is not None, "the loss has a limit"
    key, _, value = clip_key(config.actor).partition("=")
    message = f"{100 * share:.0f} % of terms lie outside {key}={value} before any update"
    remedy = f"widen {key}, or train decoupled"
    range_: dict[str, Any] = {key: value}
    return judged(share, CLIP_SHARE, message, message, remedy, fails_above=1.0, **range_)


def _gap(exam: Exam) -> Gap:
    """The gap under the current weights, before anything was learned."""
    trial = exam.trials.base
    rollout = trial.rollout
    terms = Terms(
        log_prob=trial.log_probs,
        old_log_prob=trial.log_probs,
        rollout_log_prob=rollout.log_probs,
        advantage=torch.zeros_like(trial.log_probs),
        std=trial.stds.double(),
        step=rollout.window.step_sizes,
        step_index=rollout.window.step_indices,
        sigma=rollout.window.sigmas,
        old_rollout_kl=trial.squared_distance().double() / 2,
        num_elements=rollout.num_elements,
    )
    return Gap.of(terms, Setting.of(exam.config))


def noise_floor(exam: Exam) -> Table:
    """The gap by step index, under the current weights and before any update."""
    table, clip = step_table(_gap(exam)), clip_text(exam.config.actor.clip_ratio)
    note = f"{table.note}; D = {exam.trials.base.rollout.num_elements}, clip range {clip}"
    return replace(table, name="noise_floor", title="noise floor before any update", note=note)
