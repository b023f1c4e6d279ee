"""GRPO-Guard: Flow-GRPO with a ratio that is centred and scaled alike at every noise level."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr.losses.flow_grpo import clipped
from flowcorr.losses.terms import RatioLevel, mask_terms, masked, output, pool_log_ratio, with_kl
from flowcorr.records import LossOutput, check_shape


def grpo_guard(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    kl: Tensor | None,
    std: Tensor,
    step: Tensor,
    clip_ratio: float | Tensor,
    adv_clip_max: float,
    weight: Tensor | None = None,
    keep: Tensor | None = None,
    ratio_level: RatioLevel = "step",
) -> LossOutput:
    """Clipped objective on `ratio = exp((log_ratio + bias) s)`, divided by `step`.

    `bias`, the exact KL of the step, `mean_L((mean - old_mean)^2) / (2 s^2)`, takes away the negative mean that a
    log-ratio has by itself, and `s` its dependence on the noise level; the result is no density ratio.
    Source: GRPO-Guard, arXiv:2510.22319, eq. 8 (ratio normalisation), and its gradient reweighting.

    Args:
        log_prob, old_log_prob, advantage, clip_ratio, adv_clip_max, weight, keep, ratio_level: as in `flow_grpo`.
        kl: like `log_prob`, exact KL of each step from the policy that `old_log_prob` belongs to, nats per latent
            element, differentiable: `sde.step_kl(mean, old_mean, std)`.
        std: like `log_prob`, full standard deviations of the steps.
        step: like `log_prob`, `sigma - sigma_next`.

    Raises:
        BatchError: shapes differ, or the KL is missing.
    """
    for name, column in (("std", std), ("step", step)):
        check_shape(name, column, tuple(log_prob.shape))
    terms = mask_terms(log_prob, old_log_prob, advantage, adv_clip_max=adv_clip_max, weight=weight, keep=keep)
    terms, bias = with_kl(masked(terms, _positive(std) & _positive(step)), kl)
    normalized = normalized_log_ratio(terms.log_ratio, bias, torch.where(terms.keep, std, 0.0))
    log_ratio = pool_log_ratio(normalized, terms.keep, ratio_level)
    loss, stats = clipped(terms, log_ratio, clip_ratio)
    # The step is 0 at terms that are not kept: 0 / 0 would be NaN, so they are divided by 1.
    return output(loss / torch.where(terms.keep, step, 1.0), terms, stats)


def _positive(column: Tensor) -> Tensor:
    return torch.isfinite(column) & (column > 0)


def normalized_log_ratio(delta: Tensor, kl: Tensor, std: Tensor) -> Tensor:
    """`(log_ratio + bias) s`; the bias is the exact KL of the step."""
    # A step mean that is off by r standard deviations gives delta = -r^2 / 2 + (r / sqrt(D)) z, and the KL is r^2 / 2:
    # their sum has the mean 0. Times s, it has the same spread for the same shift of the mean at every noise level.
    return (delta + kl) * std
