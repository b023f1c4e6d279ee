"""Memory and time of sharded weights (`actor.fsdp`) on each rank, from those of a whole copy."""

from __future__ import annotations

from dataclasses import replace

from flowcorr.actor.passes import passes_of
from flowcorr.config.schema import Config
from flowcorr.models import DTYPES
from flowcorr.plan.training import Training, Work
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
        training: of a whole copy, measured with `computed(config, ranks)`.
        config: the run's configuration.
        ranks: that share the weights.
    """
    passes = 1 if passes_of(config).folded else config.sampling.sde_window_size
    gathered = passes * training.transformer * (ranks - 1) / ranks  # by the passes of a micro-batch, forwards
    if not trains_shards(config, ranks):
        return replace(
            training,
            transformer=training.transformer / ranks,
            numbers=training.numbers / ranks,
            gathered=BACKWARD * training.part,
            recompute=_moving(training.recompute, FORWARD * training.part, gathered),
            backward=_moving(training.backward, BACKWARD * training.part, 2 * gathered),
        )
    held, used = DTYPES[config.model.dtype].itemsize, DTYPES[actor_dtype(config, ranks)].itemsize
    share = held / used / ranks
    forward = FORWARD * training.part
    backward = BACKWARD * training.part + training.part * (1 + max(held, 4) / used)
    return replace(
        training,
        transformer=training.transformer * share,
        numbers=training.numbers / ranks,
        gradients=training.gradients * share,
        moments=training.moments * share,
        gathered=backward,
        recompute=_moving(training.recompute, forward, gathered),
        backward=_moving(
            training.backward,
            backward + training.gradients * (share - 1),
            gathered * (2 + max(held, 4) / used),
        ),
        step=_part(training.step, share),
        moments_8bit=training.moments_8bit / ranks,  # small shards keep 32 bits, which is ignored here
        step_8bit=_part(training.step_8bit, share),
    )


def _part(work: Work, share: float) -> Work:
    """`work` on a share of the data, with as many kernels."""
    peaks = {stage: peak * share for stage, peak in work.peaks.items()}
    operations = {
        operation._replace(flops=operation.flops * share, moved=operation.moved * share): count
        for operation, count in work.operations.items()
    }
    return replace(work, peaks=peaks, moved=work.moved * share, operations=operations)


def _moving(work: Work, more: float, sent: float) -> Work:
    """`work` with `more` bytes at its peaks, whatever its rows, while each rank sends `sent` bytes to the others."""
    peaks = {stage: peak + more for stage, peak in work.peaks.items()}
    return replace(work, peaks=peaks, fixed=more, sent=sent)
