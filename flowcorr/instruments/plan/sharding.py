"""Memory and traffic of sharded weights (`actor.fsdp`) on each rank, from those of a whole copy."""

from __future__ import annotations

from dataclasses import replace

from flowcorr.actor.passes import passes_of
from flowcorr.config.schema import Config
from flowcorr.instruments.plan.tracing import Work
from flowcorr.instruments.plan.training import Training
from flowcorr.models import DTYPES
from flowcorr.rollout.base import actor_dtype, trains_shards

FORWARD, BACKWARD = 3, 2
"""Parts that are gathered at once: one computes while the next one arrives. A forward pass also copies the next one."""


def computed(config: Config, ranks: int) -> Config:
    """The config of a whole copy that computes as trained shards do: in the dtype that they are gathered in."""
    if not trains_shards(config, ranks):
        return config
    model = replace(config.model, dtype=actor_dtype(config, ranks))
    return replace(config, model=model, actor=replace(config.actor, autocast=False))


def sharded(training: Training, config: Config, ranks: int) -> Training:
    """`training` of one rank that holds a shard of all weights, and of gradients and moments if they are trained.

    A part of the weights is gathered before it computes, forwards and again backwards. Gradients of trained ones are
    whole in the dtype of that arithmetic, and then in float32, until they are reduced. An adapter and what belongs to
    it stay whole.

    Args:
        training: of a whole copy, traced with `computed(config, ranks)`.
        config: the run's configuration.
        ranks: that share the weights.
    """
    passes = 1 if passes_of(config).folded else config.sampling.sde_window_size
    sent = passes * training.transformer * (ranks - 1) / ranks  # by the passes of a micro-batch, forwards
    part, share, reduced = training.part, 1 / ranks, 0.0
    if trains_shards(config, ranks):
        held, used = DTYPES[config.model.dtype].itemsize, DTYPES[actor_dtype(config, ranks)].itemsize
        share, reduced = held / used / ranks, max(held, 4) / used
        training = replace(
            training,
            gradients=training.gradients * share,
            moments=training.moments * share,
            moments_8bit=training.moments_8bit / ranks,  # small shards keep 32 bits, which is ignored here
            step=_part(training.step, share),
        )
    gathered = part * (BACKWARD + (1 + reduced if reduced else 0))
    return replace(
        training,
        transformer=training.transformer * share,
        numbers=training.numbers / ranks,
        gathered=gathered,
        gathered_forward=FORWARD * part,
        sent=sent * (2 + reduced),
        sent_forward=sent,
    )


def _part(work: Work, share: float) -> Work:
    """`work` on a share of the data, with as many kernels."""
    return replace(work, peak=work.peak * share, moved=work.moved * share)
