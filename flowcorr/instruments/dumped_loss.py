"""The loss of a dumped step as the configuration has it, with limits that the dump does not tell left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from flowcorr.config.schema import ActorConfig
from flowcorr.dumps import LoggedLoss
from flowcorr.losses import LOSSES, resolve_loss
from flowcorr.losses.table import CLIP, Loss
from flowcorr.metrics import Metrics

UNBOUNDED = 1e9  # in place of a clip range or cap that is not known: no ratio reaches it


def is_imported(loss: LoggedLoss, allowed: Collection[str] = ()) -> bool:
    """Whether a dumped loss is one of flowcorr's, or code of the run's own that may be imported."""
    return loss.loss_mode in LOSSES or loss.loss_mode in allowed


def reads_means(loss: LoggedLoss, allowed: Collection[str] = ()) -> bool:
    """Whether a loss that is imported reads step means, which no dump holds."""
    return is_imported(loss, allowed) and resolve_loss(ActorConfig(loss_mode=loss.loss_mode)).needs_kl


def actor_of(loss: LoggedLoss, allowed: Collection[str] = ()) -> ActorConfig:
    """The keys of `actor` of a dumped loss; a limit that the dump does not tell is `UNBOUNDED`.

    The default loss stands in for one that is not imported, and, without its clip range, for one that reads step means.
    """
    means = reads_means(loss, allowed)
    stands_in = means or not is_imported(loss, allowed)
    actor = ActorConfig() if stands_in else ActorConfig(loss_mode=loss.loss_mode)
    limit, clip = resolve_loss(actor).limit, loss.clip_ratio
    if limit != CLIP or means or clip is None:
        clip = UNBOUNDED
    changes: dict[str, Any] = {} if limit is None else {limit.key: UNBOUNDED}
    changes["clip_ratio"] = tuple(clip) if isinstance(clip, Sequence) else clip
    return replace(actor, **changes, adv_clip_max=loss.adv_clip_max or actor.adv_clip_max)


def hides_limit(actor: ActorConfig, loss: Loss | None = None) -> bool:
    """Whether a loss has a limit of the ratio that is not known; `loss` as in `ratio_limit`."""
    limit = (resolve_loss(actor) if loss is None else loss).limit
    return limit is not None and getattr(actor, limit.key) == UNBOUNDED


def ratio_limit(actor: ActorConfig, loss: Loss | None = None) -> float | Sequence[float] | None:
    """Largest distance of a ratio from 1 under a loss, for all steps or by step index; None if unknown or unbounded.

    Args:
        actor: its keys.
        loss: the loss of an update; None for that of `actor`.
    """
    if hides_limit(actor, loss):
        return None
    return (resolve_loss(actor) if loss is None else loss).ratio_limit(actor)


def without_clipped_shares(metrics: Metrics) -> Metrics:
    """Remove the clipped shares from a loss's metrics, because its clip range is unknown."""
    return metrics.renamed(lambda name: None if name.startswith("actor/pg_clipfrac") else name)
