"""Flow-DPPO: an unclipped objective within a trust region of the exact KL divergence."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr import metrics
from flowcorr.losses.terms import (
    RatioLevel,
    exp_ratio,
    half_squared_shift,
    make_terms,
    output,
    pool_log_ratio,
    ratio_stats,
)
from flowcorr.records import LossOutput


def flow_dppo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    mean: Tensor,
    old_mean: Tensor | None,
    std: Tensor,
    kl_threshold: float,
    adv_clip_max: float = float("inf"),
    weight: Tensor | None = None,
    keep: Tensor | None = None,
    ratio_level: RatioLevel = "step",
) -> LossOutput:
    """Sum of `-w A ratio`, without the terms that would leave the trust region.

    A term is dropped where the exact KL of its step, `mean_L((mean - old_mean)^2) / (2 s^2)` a latent
    element, passes `kl_threshold` and the update moves further away, `A (ratio - 1) > 0`. As with a clipped
    term, its loss and gradient are 0 and it still counts. Source: Flow-DPPO, arXiv:2606.11025 (asymmetric
    divergence mask on the exact Gaussian KL), after DPPO, arXiv:2602.04879.

    Args:
        log_prob: `[b]` or `[b, T]`, nats per latent element, differentiable.
        old_log_prob: like `log_prob`, of the proximal policy.
        advantage: like `log_prob`; clamped to +-`adv_clip_max`.
        mean: `[b, *L]` or `[b, T, *L]`, step means of the current policy.
        old_mean: like `mean`, of the policy that `old_log_prob` belongs to.
        std: like `log_prob`, full standard deviations of the steps.
        kl_threshold: nats per latent element; at a trajectory level, of the pooled KL.
        adv_clip_max: largest magnitude of an advantage.
        weight: like `log_prob`, importance weights, used detached; None for 1.
        keep: like `log_prob`, bool, False where a term was rejected; None for all.
        ratio_level: what ratio and KL are taken over, see `pool_log_ratio`.

    Raises:
        BatchError: shapes differ, or a mean is missing.
    """
    terms = make_terms(log_prob, old_log_prob, advantage, adv_clip_max=adv_clip_max, weight=weight, keep=keep)
    # The KL decides and is not followed, so that no gradient needs to reach it.
    shift, terms = half_squared_shift(None if mean is None else mean.detach(), old_mean, std, terms)
    log_ratio = pool_log_ratio(terms.log_ratio, terms.keep, ratio_level)
    divergence = pool_log_ratio(shift, terms.keep, ratio_level)
    far = divergence > kl_threshold
    rising, falling = log_ratio.detach() > 0, log_ratio.detach() < 0
    dropped_above = far & rising & (terms.advantage > 0)
    dropped_below = far & falling & (terms.advantage < 0)
    coefficient = torch.where(dropped_above | dropped_below, 0.0, terms.weight * terms.advantage)
    stats = ratio_stats(terms, log_ratio, dropped_above, dropped_below)
    stats["exact_kl"] = metrics.mean(shift.double().sum(), terms.keep.sum())
    return output(-coefficient * exp_ratio(log_ratio), terms, stats)
