"""Memory and traffic of weights that compute in another dtype (`actor.autocast`), or are sharded (`actor.fsdp`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from flowcorr.actor.passes import passes_of
from flowcorr.config.schema import Config
from flowcorr.instruments.plan.tracing import Work
from flowcorr.instruments.plan.training import Training
from flowcorr.models import DTYPES
from flowcorr.rollout.base import actor_dtype, shards_weights, trains_shards

FORWARD, BACKWARD = 3, 2
"""Parts that are gathered at once: one computes while the next one arrives. A forward pass also copies the next one."""


def computed(config: Config) -> Config:
    """The config of weights in the dtype that they compute in: that of autocast, which FSDP gathers shards in."""
    if not config.actor.autocast:
        return config
    model = replace(config.model, dtype="bfloat16")
    return replace(config, model=model, actor=replace(config.actor, autocast=False))


def of_rank(training: Training, config: Config, ranks: int) -> Training:
    """`training` of one rank, of weights in `model.dtype` and in shards, if they are.

    Args:
        training: of a whole copy, traced with `computed(config)`.
        config: the run's configuration.
        ranks: that share the prompts.
    """
    if config.actor.autocast and not trains_shards(config, ranks):
        training = _under_autocast(training, config)
    return _sharded(training, config, ranks) if shards_weights(config, ranks) else training


def _under_autocast(training: Training, config: Config) -> Training:
    """`training` of weights in `model.dtype`, which autocast copies to the dtype that they compute in.

    A forward pass keeps the copies of trained weights to its end, and those of frozen ones for a layer. A backward pass
    has all of them, or under checkpointing those of a block. Activations that stay in float32 are ignored here.
    """
    adapted = config.model.lora.rank > 0
    wider = DTYPES[config.model.dtype].itemsize / torch.bfloat16.itemsize
    trained = 1.0 if adapted else wider
    copies = training.largest * torch.bfloat16.itemsize if adapted else training.transformer
    in_backward = training.transformer
    if config.actor.gradient_checkpointing:
        in_backward = max(training.part, copies + training.recompute.peak - training.backward.peak)
    return replace(
        training,
        transformer=training.transformer * wider,
        part=training.part * wider,
        gradients=training.gradients * trained,
        moments=training.moments * trained,
        step=_part(training.step, trained),
        gathered=in_backward,
        gathered_forward=copies,
    )


def _sharded(training: Training, config: Config, ranks: int) -> Training:
    """`training` of one rank that holds a shard of all weights, and of gradients and moments if they are trained.

    A part of the weights is gathered before it computes, forwards and again backwards. Gradients of trained ones are
    whole in the dtype of that arithmetic, and then in float32, until they are reduced. An adapter and what belongs to
    it stay whole.
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
        gathered=training.gathered + gathered,
        gathered_forward=training.gathered_forward + FORWARD * part,
        sent=sent * (2 + reduced),
        sent_forward=sent,
    )


def _part(work: Work, share: float) -> Work:
    """`work` on a share of the data, with as many kernels."""
    return replace(work, peak=work.peak * share, moved=work.moved * share)
