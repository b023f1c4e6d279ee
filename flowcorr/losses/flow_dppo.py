"""Flow-DPPO: an unclipped objective within a trust region of the exact KL divergence."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr.losses.terms import (
    RatioLevel,
    check_positive,
    exp_ratio,
    mask_terms,
    output,
    pool_log_ratio,
    ratio_stats,
    with_kl,
)
from flowcorr.metrics import Over
from flowcorr.records import LossOutput


def flow_dppo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    kl: Tensor | None,
    kl_threshold: float,
    adv_clip_max: float = float("inf"),
    weight: Tensor | None = None,
    keep: Tensor | None = None,
    ratio_level: RatioLevel = "step",
) -> LossOutput:
    """Sum of `-w A ratio`, without the terms that would leave the trust region.

    A term is dropped if the exact KL of its step, `mean_L((mean - old_mean)^2) / (2 s^2)` a latent element, exceeds
    `kl_threshold` and the update moves further away, `A (ratio - 1) > 0`. As with a clipped term, its loss and gradient
    are 0 and it still counts. Source: Flow-DPPO, arXiv:2606.11025 (asymmetric divergence mask on the exact Gaussian
    KL), after DPPO, arXiv:2602.04879.

    Args:
        log_prob, old_log_prob, advantage, adv_clip_max, weight, keep, ratio_level: as in `flow_grpo`.
        kl: as in `grpo_guard`; no gradient reaches it.
        kl_threshold: nats per latent element; at a trajectory level, of the pooled KL.

    Raises:
        BatchError: shapes differ, or the KL is missing.
        ConfigError: `kl_threshold` or `adv_clip_max` is not positive.
    """
    check_positive("kl_threshold", kl_threshold)
    terms = mask_terms(log_prob, old_log_prob, advantage, adv_clip_max=adv_clip_max, weight=weight, keep=keep)
    terms, kl = with_kl(terms, None if kl is None else kl.detach())
    log_ratio = pool_log_ratio(terms.log_ratio, terms.keep, ratio_level)
    far = pool_log_ratio(kl, terms.keep, ratio_level) > kl_threshold
    above = far & (log_ratio > 0) & (terms.advantage > 0)
    below = far & (log_ratio < 0) & (terms.advantage < 0)
    coefficient = torch.where(above | below, 0.0, terms.weight * terms.advantage)
    stats = ratio_stats(terms, log_ratio, above, below) | {"exact_kl": Over(terms.keep).mean(kl)}
    return output(-coefficient * exp_ratio(log_ratio), terms, stats)
