"""Flow-GRPO: the clipped policy objective of PPO on the steps of a stochastic sampler."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr.losses.terms import (
    MaskedTerms,
    RatioLevel,
    exp_ratio,
    limit_of_ratio,
    mask_terms,
    output,
    pool_log_ratio,
    ratio_stats,
)
from flowcorr.metrics import Stat
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
    ratio_level: RatioLevel = "step",
) -> LossOutput:
    """Sum of `w max(-A ratio, -A clamp(ratio, 1 - clip, 1 + clip))`, `ratio = exp(log_prob - old_log_prob)`.

    Log-probabilities are mean-pooled, so `ratio` is the D-th root of a density ratio.
    Source: Flow-GRPO, arXiv:2505.05470, section 4.1.

    Args:
        log_prob: `[b]` or `[b, T]`, nats per latent element, differentiable.
        old_log_prob: like `log_prob`, of the proximal policy.
        advantage: like `log_prob`; clamped to +-`adv_clip_max`.
        clip_ratio: half-width of the clip range, a number or a tensor like `log_prob`.
        adv_clip_max: largest magnitude of an advantage.
        weight: like `log_prob`, importance weights, used detached; None for 1.
        keep: like `log_prob`, bool, False where a term was rejected; None for all.
        ratio_level: the level of the ratio, see `pool_log_ratio`.

    Raises:
        BatchError: shapes differ.
        ConfigError: `clip_ratio` or `adv_clip_max` is not positive.
    """
    terms = mask_terms(log_prob, old_log_prob, advantage, adv_clip_max=adv_clip_max, weight=weight, keep=keep)
    log_ratio = pool_log_ratio(terms.log_ratio, terms.keep, ratio_level)
    loss, stats = clipped(terms, log_ratio, clip_ratio)
    return output(loss, terms, stats)


def clipped(
    terms: MaskedTerms, log_ratio: Tensor, clip_ratio: float | Tensor
) -> tuple[Tensor, dict[str, Stat]]:
    """The clipped objective of each term, and the metrics of its ratio; PPO, arXiv:1707.06347, eq. 7."""
    clip = limit_of_ratio("clip_ratio", clip_ratio, log_ratio)
    low, high = 1 - clip, 1 + clip
    ratio, minus_a = exp_ratio(log_ratio), -terms.advantage
    # The larger loss of both: a ratio beyond the range on the side that A asks for has no gradient, the others keep it.
    loss = terms.weight * torch.maximum(minus_a * ratio, minus_a * ratio.clamp(low, high))
    return loss, ratio_stats(terms, log_ratio, above=ratio > high, below=ratio < low)
