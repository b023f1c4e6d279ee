"""The check of the clip range, and the gap by step under the current weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowcorr.instruments.clip_noise import QUANTILES, clip_key, clip_text, ratio_distance
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import judged, passed
from flowcorr.instruments.finding import Column, Finding, Table
from flowcorr.instruments.gap_words import two_digits
from flowcorr.losses import clip_by_term, loss_of, resolve_loss

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
    share = float(outside_clip(exam).double().mean())
    key, _, value = clip_key(config.actor).partition("=")
    message = f"{100 * share:.0f} % of terms lie outside {key}={value} before any update"
    remedy = f"widen {key}, or train decoupled"
    range_: dict[str, Any] = {key: value}
    return judged(share, CLIP_SHARE, message, message, remedy, fails_above=1.0, **range_)


def outside_clip(exam: Exam) -> Tensor:
    """Terms `[B, T]` whose ratio is outside the clip range before any update."""
    trial = exam.trials.base
    step_indices, actor = trial.rollout.window.step_indices, exam.config.actor
    limit = resolve_loss(actor).ratio_limit(actor)
    if limit is None:
        return torch.zeros_like(step_indices, dtype=torch.bool)
    delta = (trial.log_probs - trial.rollout.log_probs).double()
    step_kl = trial.squared_distance().double() / 2
    distance = ratio_distance(delta, step_kl, trial.stds.double(), actor)
    return distance > clip_by_term(limit, step_indices)


def noise_floor(exam: Exam) -> Table:
    """The gap by step index, under the current weights: nats per latent element, before anything was learned."""
    trial = exam.trials.base
    rollout = trial.rollout
    delta = (trial.log_probs - rollout.log_probs).double().abs()
    squared, outside = trial.squared_distance(), outside_clip(exam)
    rows = []
    for index in rollout.window.step_indices.unique().tolist():
        here = rollout.window.step_indices == index
        rows.append(
            (
                index,
                float(rollout.window.sigmas[here][0]),
                *torch.quantile(delta[here], delta.new_tensor(QUANTILES)).tolist(),
                float(squared[here].mean() / 2),
                float(outside[here].double().mean()),
            )
        )
    tiny = "{:.1e}".format
    return Table(
        name="noise_floor",
        title="noise floor before any update",
        columns=(
            Column(name="step_index", heading="step"),
            Column(name="sigma", show="{:.3f}".format),
            *(
                Column(name=f"abs_delta_{quantile:g}", heading=f"|delta| {quantile:.0%}", show=tiny)
                for quantile in QUANTILES
            ),
            Column(
                name="exact_kl", heading="joint nats", show=lambda kl: two_digits(rollout.num_elements * kl)
            ),
            Column(name="outside_clip", heading="outside clip", show="{:.0%}".format),
        ),
        rows=rows,
        note="|delta log p| in nats a latent element, joint nats of a step; "
        f"D = {rollout.num_elements}, clip range {clip_text(exam.config.actor.clip_ratio)}",
    )
