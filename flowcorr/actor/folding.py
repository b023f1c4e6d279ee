"""Measures once in a run whether `actor.fold_steps` is faster here: on some GPUs large batches are slower."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from flowcorr.actor.scoring import Scorer
from flowcorr.records import Rollout

logger = logging.getLogger(__name__)

REPEATS = 2  # the faster one counts: the first may compile or warm up
TOLERANCE = 1.1  # smaller ratios of times are noise


def warn_if_folding_is_slower(
    scorer: Scorer, rollout: Rollout, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Time a forward and a backward pass of one micro-batch both ways, and warn if step by step is faster.

    It only warns: results of a run must not depend on a clock. The caller clears the gradients.

    Args:
        scorer: scores the steps.
        rollout: the samples of a micro-batch, with gradients to the trained weights.
        clock: seconds.
    """

    def seconds(parts: Sequence[Rollout]) -> float:
        begin = clock()
        for part in parts:
            scorer.score(part).log_probs.sum().backward()
        if rollout.window.latents.is_cuda:
            torch.cuda.synchronize(rollout.window.latents.device)
        return clock() - begin

    steps = [rollout.step(t) for t in range(rollout.num_steps)]
    times = [(seconds([rollout]), seconds(steps)) for _ in range(REPEATS)]
    folded, apart = (min(ways) for ways in zip(*times, strict=True))
    if folded > TOLERANCE * apart:
        logger.warning(
            "actor.fold_steps=True is slower here: %d samples take %.3g s with the %d steps of their windows in one "
            "forward pass, and %.3g s step by step, in less memory; set actor.fold_steps=false",
            *(rollout.num_samples, folded, rollout.num_steps, apart),
        )
