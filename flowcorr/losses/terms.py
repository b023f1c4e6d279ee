"""Shared by all losses: the terms that count, their ratios, and sums with counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowcorr import metrics
from flowcorr.correction.exponents import bounded
from flowcorr.errors import BatchError, ConfigError, unknown_choice
from flowcorr.metrics import Metrics, Over, Stat
from flowcorr.records import LossOutput, check_shape, check_tensor

RatioLevel = Literal["step", "trajectory_mean", "trajectory_sum"]
RATIO_LEVELS = ("step", "trajectory_mean", "trajectory_sum")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskedTerms:
    """The numbers that a loss reads, `[b]` or `[b, T]`, with zeros for terms that take no part.

    Attributes:
        log_ratio: `log_prob - old_log_prob`, differentiable; 0 where `keep` is false.
        advantage: clamped; 0 where `keep` is false.
        weight: detached; 0 where `keep` is false.
        valid: bool, finite terms.
        keep: bool, valid terms that were not rejected.
    """

    log_ratio: Tensor
    advantage: Tensor
    weight: Tensor
    valid: Tensor
    keep: Tensor


def mask_terms(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    adv_clip_max: float,
    weight: Tensor | None,
    keep: Tensor | None,
) -> MaskedTerms:
    """Check shapes, and mask rejected and non-finite terms before anything is computed from them.

    A mask after `exp` would be too late: the gradient of a masked term would be 0 times infinity.

    Raises:
        BatchError: a shape is not that of `log_prob`, or `keep` is not of bools.
        ConfigError: `adv_clip_max` is not positive.
    """
    check_positive("adv_clip_max", adv_clip_max)
    for name, column in (("log_prob", log_prob), ("advantage", advantage)):
        check_tensor(name, column, "[b] or [b, T]")
    shape = tuple(log_prob.shape)
    if log_prob.dim() not in (1, 2):
        raise BatchError(f"log_prob has shape {list(shape)}; it must be [b] or [b, T]")
    check_shape("old_log_prob", old_log_prob, shape)
    if len(shape) == 2 and tuple(advantage.shape) == shape[:1]:
        raise BatchError(
            f"advantage has shape {list(advantage.shape)}; it must be {list(shape)}, as nothing is broadcast: "
            "for one value per sample, give advantage[:, None].expand_as(log_prob)"
        )
    check_shape("advantage", advantage, shape)
    valid = torch.isfinite(log_prob.detach()) & torch.isfinite(old_log_prob) & torch.isfinite(advantage)
    if weight is not None:
        check_shape("weight", weight, shape)
        valid = valid & torch.isfinite(weight)
    if keep is not None:
        check_shape("keep", keep, shape)
        if keep.dtype != torch.bool:
            raise BatchError(
                f"keep has dtype {keep.dtype}; it must be bool: give keep != 0 if 1 keeps a term"
            )
    log_ratio = torch.where(valid, log_prob, 0.0) - torch.where(valid, old_log_prob.detach(), 0.0)
    weight = torch.ones_like(advantage) if weight is None else weight.detach()
    terms = MaskedTerms(
        log_ratio=log_ratio,
        advantage=advantage.clamp(-adv_clip_max, adv_clip_max),
        weight=weight,
        valid=valid,
        keep=valid if keep is None else valid & keep,
    )
    return masked(terms, valid)


def check_positive(name: str, value: float) -> None:
    """Raise `ConfigError` unless a setting is a positive number, which may be infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name}={value!r} must be a positive number")


def limit_of_ratio(name: str, limit: float | Tensor, log_ratio: Tensor) -> Tensor:
    """A limit of ratios in their dtype: 0-d of a number, or a tensor like `log_ratio`.

    Raises:
        BatchError: a tensor's shape differs.
        ConfigError: a number is not positive.
    """
    if isinstance(limit, Tensor):
        check_shape(name, limit, tuple(log_ratio.shape))
        return limit.to(log_ratio.dtype)
    check_positive(name, limit)
    return log_ratio.new_full((), limit)


def masked(terms: MaskedTerms, valid: Tensor) -> MaskedTerms:
    """Mask the terms outside `valid` as if they were not finite."""
    keep = terms.keep & valid
    return replace(
        terms,
        log_ratio=torch.where(keep, terms.log_ratio, 0.0),
        advantage=torch.where(keep, terms.advantage, 0.0),
        weight=torch.where(keep, terms.weight, 0.0),
        valid=terms.valid & valid,
        keep=keep,
    )


def with_kl(terms: MaskedTerms, kl: Tensor | None) -> tuple[MaskedTerms, Tensor]:
    """Mask terms with a KL from the old policy that is not finite; returns the terms, and the KL with 0 if not kept.

    Args:
        terms: the loss's terms.
        kl: like `log_prob`, nats per latent element.

    Raises:
        BatchError: the KL is missing, or its shape does not fit.
    """
    if kl is None:
        raise BatchError(
            "kl is missing, and this loss needs the exact KL from the old policy, sde.step_kl of both step means; in "
            "bypass mode let the rollout return its step means, in decoupled mode keep the recomputed ones"
        )
    check_shape("kl", kl, tuple(terms.keep.shape))
    terms = masked(terms, torch.isfinite(kl.detach()))
    return terms, torch.where(terms.keep, kl, 0.0)


def pool_log_ratio(log_ratio: Tensor, keep: Tensor, level: RatioLevel) -> Tensor:
    """Log-ratios at the level that the ratio is taken at, every step of a trajectory holding its pooled one.

    `trajectory_mean` and `trajectory_sum` pool over the kept steps of the window; the pooled value stands at
    every step, so that weights, counts and denominators stay those of steps. Source: sequence-level ratios
    as in GSPO, arXiv:2507.18071, eq. 7 (the mean).

    Args:
        log_ratio: `[b, T]`, or `[b]` at level `step`.
        keep: like `log_ratio`, bool.
        level: `step`, `trajectory_mean` or `trajectory_sum`.

    Raises:
        ConfigError: `level` is unknown.
        BatchError: a trajectory level is asked of single steps.
    """
    if level not in RATIO_LEVELS:
        raise ConfigError(unknown_choice("actor.ratio_level", level, RATIO_LEVELS))
    if level == "step":
        return log_ratio
    if log_ratio.dim() != 2:
        raise BatchError(
            f"actor.ratio_level={level} needs whole windows [b, T], not shape {list(log_ratio.shape)}; set "
            "algorithm.rollout_correction.bypass_scope=trajectory or actor.ratio_level=step"
        )
    # Steps form a Markov chain, so the window's log-ratio is the sum over its steps; the mean keeps a step's scale, and
    # with it the clip range. Every step holds the pooled value and gets its gradient.
    total = torch.where(keep, log_ratio, 0.0).sum(1, keepdim=True)
    if level == "trajectory_mean":
        total = total / keep.sum(1, keepdim=True).clamp(min=1)
    return torch.where(keep, total, 0.0)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)`, its exponent bounded to +-20 so that no ratio, and no gradient, overflows."""
    return bounded(log_ratio).exp()


def clip_by_term(clip_ratio: float | Sequence[float], step_index: Tensor) -> float | Tensor:
    """The clip range of each term: the number that holds for all, or the value of its step.

    Args:
        clip_ratio: `actor.clip_ratio`, a number or one for each step of the schedule, from the first on.
        step_index: int64, the terms' places in the schedule.

    Returns:
        A number, or a tensor like `step_index`, float64.
    """
    if isinstance(clip_ratio, Sequence):
        return torch.tensor(clip_ratio, dtype=torch.float64, device=step_index.device)[step_index]
    return clip_ratio


def output(loss: Tensor, terms: MaskedTerms, stats: Mapping[str, Stat]) -> LossOutput:
    """Sum up a loss, with the counts of its terms and its metrics under `actor/`; it is 0 at terms not kept."""
    # A sum and its counts: micro-batches keep different numbers of terms, so a mean of their means would be wrong.
    finite = terms.valid.sum()
    nonfinite = metrics.mean(terms.valid.numel() - finite, terms.valid.numel())
    return LossOutput(
        loss_sum=loss.sum(),
        count_all=finite,
        count_kept=terms.keep.sum(),
        metrics=Metrics({**stats, "nonfinite_fraction": nonfinite}).prefixed("actor/"),
    )


def ratio_stats(
    terms: MaskedTerms, log_ratio: Tensor, above: Tensor | None = None, below: Tensor | None = None
) -> dict[str, Stat]:
    """Metrics of the ratio, over kept terms.

    Args:
        terms: the loss's terms; `ppo_kl` is the mean of their `-log_ratio`.
        log_ratio: as the loss exponentiates it.
        above: bool, terms with a ratio above the loss's range, if it has one. In a clipped objective, terms with a
            negative advantage still have a gradient there.
        below: bool, likewise below it, and with a positive advantage.
    """
    # Float64: in float32, a ratio of 1 + 1e-5 keeps two digits of its distance from 1.
    kept = Over(terms.keep)
    ratio = exp_ratio(torch.where(terms.keep, log_ratio.detach(), 0.0).double())
    stats = {
        "ppo_kl": kept.mean(-terms.log_ratio),
        "ratio_mean": kept.mean(ratio),
        "ratio_std": kept.std(ratio),
    }
    if above is not None:
        stats["pg_clipfrac"] = kept.share(above if below is None else above | below)
        stats["pg_clipfrac_higher"] = kept.share(above)
    if below is not None:
        stats["pg_clipfrac_lower"] = kept.share(below)
    return stats
