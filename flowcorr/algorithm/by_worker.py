"""Measures the gap of each rollout worker, because one worker's fault is diluted in the gap of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowcorr.correction.exponents import k3
from flowcorr.correction.ratios import log_ratios
from flowcorr.distributed import gather
from flowcorr.metrics import Stats, mean
from flowcorr.records import Terms

_LABEL = "the gap at each step"


def by_worker(parts: Sequence[Terms], num_workers: int, num_steps: int) -> Stats:
    """`rollout_corr/worker_{}/logprob_abs_diff`, `k3_kl` and `relative_gap`, by the worker that sampled.

    The relative gap divides a worker's gap by the mean gap of all workers at the same steps of the schedule, since gaps
    of steps differ by orders of magnitude. All ranks have to call it together.

    Args:
        parts: terms with the compared policy's scores as `log_prob`; a rank may have none.
        num_workers: of the run; nothing is measured of one.
        num_steps: `S`, steps of the schedule.
    """
    if num_workers < 2:
        return {}
    known = [part.windows() for part in parts if part.worker is not None and part.log_prob.numel()]
    if not known:  # all groups of this rank were dropped
        gather(None, _LABEL)
        return {}
    terms = Terms.concatenate(known)
    assert terms.worker is not None
    ratios = log_ratios(terms.log_prob, terms.rollout_log_prob, terms.keep)
    of_worker, at_step = _one_hot(terms.worker, num_workers), _one_hot(terms.step_index, num_steps)
    gap, valid = ratios.delta.abs().flatten(), ratios.valid.double().flatten()
    ranks = gather([(gap @ at_step).tolist(), (valid @ at_step).tolist()], _LABEL)
    total, number = gap.new_tensor([rank for rank in ranks if rank is not None]).sum(0)
    at_its_step = at_step @ (total / number.clamp(min=1))
    count = valid @ of_worker
    stats = {
        "logprob_abs_diff": mean(gap @ of_worker, count),
        "k3_kl": mean(k3(ratios.delta).flatten() @ of_worker, count),
        "relative_gap": mean(gap @ of_worker, (valid * at_its_step) @ of_worker),
    }
    return {f"rollout_corr/worker_{{}}/{name}": stat for name, stat in stats.items()}


def _one_hot(places: Tensor, count: int) -> Tensor:
    return (places.flatten()[:, None] == torch.arange(count, device=places.device)).double()
