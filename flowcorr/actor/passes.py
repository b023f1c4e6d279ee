"""Cuts a batch into passes through the transformer, by `actor.micro_batch_size` and `actor.fold_steps`."""

from __future__ import annotations

from dataclasses import dataclass

from flowcorr.algorithm.apply import sees_windows
from flowcorr.config.schema import ActorConfig, Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The size of the passes that a batch is cut into.

    Attributes:
        samples: number of samples in a micro-batch.
        folded: whether one pass scores all steps of a micro-batch's windows.
    """

    samples: int
    folded: bool


def passes_of(config: Config, rows: int | None = None) -> Passes:
    """The passes under a configuration: an explicit key stands, and `auto` gives the fewest passes within the bound.

    Args:
        config: the run's.
        rows: rows of the largest pass, each one image at one step; None does not bound it.
    """
    actor, samples, steps = config.actor, config.mini_batch_size, config.sampling.sde_window_size
    rows = samples * steps if rows is None else rows
    size, folded = actor.micro_batch_size, actor.fold_steps
    if size != "auto":
        size = samples if size is None else size
        return Passes(samples=size, folded=size * steps <= rows if folded == "auto" else folded)
    windows, single = (_even(samples, number) for number in (rows // steps, rows))
    # A loss of whole windows holds the graph of all their steps at once.
    whole_windows = sees_windows(actor, config.algorithm.rollout_correction)
    if folded == "auto":
        fewer = -(-samples // windows) <= -(-samples // single) * steps
        folded = steps <= rows and (whole_windows or fewer)
    return Passes(samples=windows if folded or whole_windows else single, folded=folded)


def _even(samples: int, most: int) -> int:
    """Size of equal micro-batches of at most `most` samples each, for the fewest micro-batches."""
    parts = -(-samples // max(1, most))
    return -(-samples // parts)


def is_bounded(actor: ActorConfig) -> bool:
    """Whether these keys leave the size of a pass to the run."""
    return "auto" in (actor.micro_batch_size, actor.fold_steps)
