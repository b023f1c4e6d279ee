"""Flow-GRPO: the clipped policy objective of PPO on the steps of a stochastic sampler."""

from __future__ import annotations

from torch import Tensor

from flowcorr.losses.terms import (
    RatioLevel,
    clip_range,
    clipped_surrogate,
    exp_ratio,
    make_terms,
    output,
    outside,
    pool_log_ratio,
    ratio_stats,
)
from flowcorr.records import LossOutput


def flow_grpo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    clip_ratio: float | Tensor,
    adv_clip_max: float,
    weight: Tensor | None = None,
    keep: Tensor | None = None,
    clip_center: Tensor | None = None,
    ratio_level: RatioLevel = "step",
) -> LossOutput:
    """Sum of `w max(-A ratio, -A clamp(ratio, 1 - clip, 1 + clip))`, `ratio = exp(log_prob - old_log_prob)`.

    Log-probabilities are mean-pooled, so `ratio` is the D-th root of a density ratio; with a `clip_center` it is
    that over `exp(clip_center)`. Source: Flow-GRPO, arXiv:2505.05470, section 4.1.

    Args:
        log_prob: `[b]` or `[b, T]`, nats per latent element, differentiable.
        old_log_prob: like `log_prob`, of the proximal policy.
        advantage: like `log_prob`; clamped to +-`adv_clip_max`.
        clip_ratio: half-width of the clip range, a number or a tensor like `log_prob`.
        adv_clip_max: largest magnitude of an advantage.
        weight: like `log_prob`, importance weights, used detached; None for 1.
        keep: like `log_prob`, bool, False where a term was rejected; None for all.
        clip_center: like `log_prob`, taken off the log-ratio, used detached; None for 0.
        ratio_level: what a ratio is taken over, see `pool_log_ratio`.

    Raises:
        BatchError: shapes differ.
    """
    terms = make_terms(
        log_prob,
        old_log_prob,
        advantage,
        adv_clip_max=adv_clip_max,
        weight=weight,
        keep=keep,
        clip_center=clip_center,
    )
    log_ratio = pool_log_ratio(terms.log_ratio, terms.keep, ratio_level)
    ratio = exp_ratio(log_ratio)
    clip = clip_range(ratio, clip_ratio)
    loss = clipped_surrogate(terms, ratio, clip)
    return output(loss, terms, ratio_stats(terms, log_ratio, *outside(ratio, clip)))
