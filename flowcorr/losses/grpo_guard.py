"""GRPO-Guard: a clipped objective whose ratio is centred and scaled alike at every noise level."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr.losses.terms import (
    RatioLevel,
    clip_range,
    clipped_surrogate,
    exp_ratio,
    half_squared_shift,
    make_terms,
    output,
    outside,
    pool_log_ratio,
    ratio_stats,
)
from flowcorr.records import LossOutput, check_shape


def grpo_guard(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    mean: Tensor,
    old_mean: Tensor | None,
    std: Tensor,
    step: Tensor,
    clip_ratio: float | Tensor,
    adv_clip_max: float,
    weight: Tensor | None = None,
    keep: Tensor | None = None,
    clip_center: Tensor | None = None,
    ratio_level: RatioLevel = "step",
) -> LossOutput:
    """Clipped objective on `ratio = exp((log_ratio + bias) s)`, divided by `step`.

    `bias = mean_L((mean - old_mean)^2) / (2 s^2)`, differentiable, takes away the negative mean that a
    log-ratio has by itself, and `s` its dependence on the noise level; the result is no density ratio. What a
    `clip_center` takes away is not explained by the means: lost precision of the log-probabilities.
    Source: GRPO-Guard, arXiv:2510.22319, eq. 8 (ratio normalisation), and its gradient reweighting.

    Args:
        log_prob: `[b]` or `[b, T]`, nats per latent element, differentiable.
        old_log_prob: like `log_prob`, of the proximal policy.
        advantage: like `log_prob`; clamped to +-`adv_clip_max`.
        mean: `[b, *L]` or `[b, T, *L]`, step means of the current policy, differentiable.
        old_mean: like `mean`, of the policy that `old_log_prob` belongs to.
        std: like `log_prob`, full standard deviations of the steps.
        step: like `log_prob`, `sigma - sigma_next`.
        clip_ratio: half-width of the clip range, a number or a tensor like `log_prob`.
        adv_clip_max: largest magnitude of an advantage.
        weight: like `log_prob`, importance weights, used detached; None for 1.
        keep: like `log_prob`, bool, False where a term was rejected; None for all.
        clip_center: like `log_prob`, taken off the log-ratio, used detached; None for 0.
        ratio_level: what a ratio is taken over, see `pool_log_ratio`.

    Raises:
        BatchError: shapes differ, or a mean is missing.
    """
    check_shape("step", step, tuple(log_prob.shape))
    terms = make_terms(
        log_prob,
        old_log_prob,
        advantage,
        adv_clip_max=adv_clip_max,
        weight=weight,
        keep=keep,
        clip_center=clip_center,
    )
    bias, terms = half_squared_shift(mean, old_mean, std, terms)
    scale = torch.where(terms.keep, std, 0.0)
    log_ratio = pool_log_ratio((terms.log_ratio + bias) * scale, terms.keep, ratio_level)
    ratio = exp_ratio(log_ratio)
    clip = clip_range(ratio, clip_ratio)
    loss = clipped_surrogate(terms, ratio, clip) / torch.where(terms.keep, step, 1.0)
    return output(loss, terms, ratio_stats(terms, log_ratio, *outside(ratio, clip)))
