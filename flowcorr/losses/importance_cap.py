"""Truncated importance sampling: a policy gradient with a cap on the ratio."""

from __future__ import annotations

from torch import Tensor

from flowcorr.losses.terms import (
    RatioLevel,
    exp_ratio,
    limit_of_ratio,
    mask_terms,
    output,
    pool_log_ratio,
    ratio_stats,
)
from flowcorr.records import LossOutput


def importance_cap(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    cap: float | Tensor,
    adv_clip_max: float,
    weight: Tensor | None = None,
    keep: Tensor | None = None,
    ratio_level: RatioLevel = "step",
) -> LossOutput:
    """Sum of `-w A min(ratio, cap)`, `ratio = exp(log_prob - old_log_prob)`; a capped term has no gradient.

    Meant for bypass mode, where `old_log_prob` is the rollout's and the ratio corrects the mismatch too.
    Source: truncated importance sampling, Ionides 2008, as the policy loss of prime-rl.

    Args:
        log_prob, old_log_prob, advantage, adv_clip_max, weight, keep, ratio_level: as in `flow_grpo`.
        cap: largest ratio, a number or a tensor like `log_prob`.

    Raises:
        BatchError: shapes differ.
        ConfigError: `cap` or `adv_clip_max` is not positive.
    """
    terms = mask_terms(log_prob, old_log_prob, advantage, adv_clip_max=adv_clip_max, weight=weight, keep=keep)
    log_ratio = pool_log_ratio(terms.log_ratio, terms.keep, ratio_level)
    ratio, cap = exp_ratio(log_ratio), limit_of_ratio("cap", cap, log_ratio)
    # The gradient of a ratio is `ratio grad log_prob`, so the ratio itself is the importance weight of the score; the
    # cap bounds the variance of the weights, and costs a bias.
    loss = -terms.weight * terms.advantage * ratio.clamp(max=cap)
    return output(loss, terms, ratio_stats(terms, log_ratio, above=ratio > cap))
