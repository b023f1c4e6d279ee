"""The largest pass through the transformer, for a run that chooses it.

On a CPU the time of a row falls until a pass has some 2,500 tokens, and grows again beyond 5,000, at every size of
image and prompt (`tests/benchmarks/pass_size.py`). Memory grows with every row. So the bound is in bytes: no clock is
read, and the same machine makes the same choice again.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from flowcorr import distributed
from flowcorr.actor.scoring import Scorer
from flowcorr.devices import free_memory
from flowcorr.records import Rollout

logger = logging.getLogger(__name__)

CPU_BYTES = 96 * 2**20
"""Bytes that the graph of a pass may hold on a CPU, counted as if no block were computed again.

They are 4,100 to 4,700 tokens of the embedded model.
"""
GPU_SHARE = 0.8
"""Share of a GPU's free memory that a pass may take; the rest is for fragmentation and for the loss."""


def bound_passes(scorer: Scorer, rollout: Rollout) -> None:
    """Set `scorer.rows` if the configuration leaves passes to the run, and the bound is not known yet.

    All ranks have to call, and take the smallest bound of those that have samples. If none has, or weights are sharded,
    whose passes need all ranks, a later call decides.

    Args:
        scorer: scores the rows.
        rollout: samples of the run.

    Raises:
        torch.OutOfMemoryError: a GPU has no memory for a pass of one row.
    """
    if scorer.is_measured:
        return
    samples = distributed.gather(rollout.num_samples, "the samples of each rank")
    if not (all(samples) if scorer.weights.sharded else any(samples)):
        return
    own = _largest_pass(scorer, rollout) if rollout.num_samples else None
    scorer.rows = min(rows for rows in distributed.gather(own, "the largest pass") if rows is not None)
    if distributed.is_main():
        passes = scorer.passes
        logger.info(
            "memory allows passes of %d rows (one image at one step): micro-batches of %d samples, %s",
            *(scorer.rows, passes.samples, "all steps at once" if passes.folded else "step by step"),
        )


def _largest_pass(scorer: Scorer, rollout: Rollout) -> int:
    """Largest number of rows that fits into the bound in bytes; at least 1."""
    device = scorer.weights.device
    first = torch.zeros(1, dtype=torch.long, device=rollout.group_ids.device)
    one, two = (rollout.select(first.repeat(rows)).step(0) for rows in (1, 2))
    # Equal latents of a prompt would be one row of the pass.
    latents = torch.cat([one.window.latents, 2 * one.window.latents])
    two = replace(two, window=replace(two.window, latents=latents))
    with torch.compiler.set_stance("force_eager"):  # blocks would be compiled for these rows
        if device.type != "cuda":
            row, room = _graph(scorer, two) - _graph(scorer, one), float(CPU_BYTES)
        else:
            _peak(scorer, one)  # allocates what all passes share
            smaller = _peak(scorer, one)
            try:
                row, room = _peak(scorer, two) - smaller, _room(scorer, device)
            except torch.OutOfMemoryError:
                if scorer.weights.sharded:  # the other ranks are waiting inside this pass
                    raise
                return 1
    return max(1, int(room / max(row, 1)))


def _graph(scorer: Scorer, rollout: Rollout) -> int:
    """Bytes that a pass keeps for its backward pass, weights included, if no block is computed again."""
    transformer = scorer.weights.transformer
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()  # not by address: what FSDP has gathered is freed meanwhile
        return tensor

    if scorer.config.actor.gradient_checkpointing:
        transformer.disable_gradient_checkpointing()
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _graph_holder = scorer.score(rollout)  # as long as it lives, no storage is counted for another
    finally:
        if scorer.config.actor.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
    return sum(kept.values())


@torch.enable_grad()
def _peak(scorer: Scorer, rollout: Rollout) -> int:
    """Peak bytes of a GPU in a forward and a backward pass; resets torch's record of the peak."""
    device = scorer.weights.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        scorer.score(rollout).log_probs.sum().backward()
    finally:
        for parameter in scorer.weights.parameters.values():
            parameter.grad = None
    return torch.cuda.max_memory_allocated(device) - before


def _room(scorer: Scorer, device: torch.device) -> float:
    """Bytes of a GPU that a pass may take; gradients and moments, which do not exist yet, are set aside."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    trained = sum(parameter.nbytes for parameter in scorer.weights.parameters.values())
    return GPU_SHARE * (free_memory(device) + cached - 3 * trained)
