"""How far ratios are from 1 before anything was learned, and the clip range beside which that is judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from flowcorr.algorithm import noise_floor
from flowcorr.config.schema import ActorConfig
from flowcorr.instruments.dumped_loss import ratio_limit
from flowcorr.losses import clip_by_term, resolve_loss
from flowcorr.records import Terms

QUANTILES = (0.5, 0.9, 0.99)  # that tables of a gap show


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartRatios:
    """The ratios that the loss would start with in bypass mode, beside its clip range.

    Attributes:
        distance: `[B, T]`, `|ratio - 1|`.
        limit: `[B, T]`, how far the loss lets each be from 1; NaN where no bound is known.
    """

    distance: Tensor
    limit: Tensor

    @classmethod
    def of(cls, gap: Terms, actor: ActorConfig) -> Self:
        """Those of a gap, under one loss."""
        delta = gap.old_log_prob.double() - gap.rollout_log_prob.double()
        limit, known = ratio_limit(actor), torch.ones_like(delta)
        return cls(
            distance=ratio_distance(delta, gap.old_rollout_kl, gap.std, actor),
            limit=known * (math.nan if limit is None else clip_by_term(limit, gap.step_index)),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Those of all parts in order."""
        return cls(
            distance=torch.cat([part.distance for part in parts]),
            limit=torch.cat([part.limit for part in parts]),
        )

    def outside(self, where: Tensor | None = None) -> float | None:
        """Share beyond the clip range, of the terms `where`, or of all; None where no range is known."""
        known = ~self.limit.isnan() if where is None else where & ~self.limit.isnan()
        return float((self.distance > self.limit)[known].double().mean()) if known.any() else None


def ratio_distance(delta: Tensor, step_kl: Tensor | None, stds: Tensor, actor: ActorConfig) -> Tensor:
    """`[B, T]`, `|ratio - 1|` of the ratio that the loss would start with in bypass mode.

    Args:
        delta: `[B, T]`, log-probs of the training stack less those of the rollout.
        step_kl: `[B, T]`, exact KL of the steps, nats a latent element; None for a loss that does not read it.
        stds: `[B, T]`, of the steps.
        actor: the loss.
    """
    log_ratio = resolve_loss(actor).log_ratio(delta, step_kl, stds)
    return noise_floor.ratio_distance(log_ratio, torch.ones_like(delta, dtype=torch.bool), actor.ratio_level)


def clip_key(actor: ActorConfig) -> str:
    """The key that bounds the ratio, with its value; empty where the loss has none."""
    limit = resolve_loss(actor).limit
    return "" if limit is None else f"actor.{limit.key}={clip_text(getattr(actor, limit.key))}"


def clip_text(clip_ratio: float | Sequence[float]) -> str:
    """A clip range in words: the number, or those by step index."""
    if isinstance(clip_ratio, Sequence):
        return "[" + ", ".join(f"{value:g}" for value in clip_ratio) + "]"
    return f"{clip_ratio:g}"
