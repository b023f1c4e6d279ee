"""How far ratios are from 1 before anything was learned, and the clip range beside which that is judged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowcorr.algorithm import noise_floor
from flowcorr.config.schema import ActorConfig
from flowcorr.losses import resolve_loss

QUANTILES = (0.5, 0.9, 0.99)  # that tables of a gap show


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
