"""The gap of each rollout worker: a fault of one among many is diluted in the gap of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowcorr.correction.ratios import k3, log_ratios
from flowcorr.metrics import Metrics, Stat, mean
from flowcorr.records import Terms


def by_worker(parts: Sequence[Terms], num_workers: int) -> Metrics:
    """`rollout_corr/worker_{}/logprob_abs_diff` and `k3_kl`: as by step, by the worker that sampled.

    Args:
        parts: terms whose `log_prob` is the policy's that is compared with the rollout's.
        num_workers: of the run; nothing is measured of one.
    """
    found = []
    for terms in (part.windows() for part in parts):
        if terms.worker is not None and num_workers > 1:
            ratios = log_ratios(terms.log_prob, terms.rollout_log_prob, terms.keep)
            workers = torch.arange(num_workers, device=terms.worker.device)
            of_worker = (terms.worker.flatten()[:, None] == workers).double()
            found.append(_means(ratios.delta, ratios.valid, of_worker))
    return Metrics.merged(map(Metrics.from_stats, found))


def _means(delta: Tensor, valid: Tensor, of_worker: Tensor) -> dict[str, Stat]:
    count = valid.double().flatten() @ of_worker
    values = {"logprob_abs_diff": delta.abs(), "k3_kl": k3(delta)}
    return {
        f"rollout_corr/worker_{{}}/{name}": mean(value.flatten() @ of_worker, count)
        for name, value in values.items()
    }
