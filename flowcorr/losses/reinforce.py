"""REINFORCE: a policy gradient without a ratio; importance weights come from the caller."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr.losses.terms import mask_terms, output, ratio_stats
from flowcorr.records import LossOutput


def reinforce(
    log_prob: Tensor,
    advantage: Tensor,
    *,
    adv_clip_max: float,
    weight: Tensor | None = None,
    keep: Tensor | None = None,
    old_log_prob: Tensor | None = None,
) -> LossOutput:
    """Sum of `-w A log_prob`. Source: Williams 1992; with `w` the truncated ratio, off-policy.

    Args:
        log_prob: `[b]` or `[b, T]`, nats per latent element, differentiable.
        advantage: like `log_prob`; clamped to +-`adv_clip_max`.
        adv_clip_max: largest magnitude of an advantage.
        weight: like `log_prob`, importance weights, used detached; None for 1.
        keep: like `log_prob`, bool, False where a term was rejected; None for all.
        old_log_prob: like `log_prob`; adds the ratio's metrics. The loss has no ratio, but a term whose old log-prob is
            not finite is left out.

    Raises:
        BatchError: shapes differ.
    """
    anchor = log_prob.detach() if old_log_prob is None else old_log_prob
    terms = mask_terms(log_prob, anchor, advantage, adv_clip_max=adv_clip_max, weight=weight, keep=keep)
    # Masked before the product: a log-prob of NaN times a weight of 0 would make the whole sum NaN.
    loss = -terms.weight * terms.advantage * torch.where(terms.keep, log_prob, 0.0)
    return output(loss, terms, {} if old_log_prob is None else ratio_stats(terms, terms.log_ratio))
