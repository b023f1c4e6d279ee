"""The terms from which the losses of a training step were computed, see `flowcorr.dumps`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowcorr import distributed, dumps
from flowcorr.algorithm.terms import exact_kl
from flowcorr.config.schema import ActorConfig
from flowcorr.dumps import DumpedTerms
from flowcorr.records import ActorBatch, Terms


class TermRecorder:
    """The `record` of an update: keeps the last score of each term.

    Args:
        batch: the batch of the update.
        advantages: `[B]`, before rejection.
        rewards: `[B]`.
        bypass: whether the training step is in bypass mode.
    """

    def __init__(self, batch: ActorBatch, *, advantages: Tensor, rewards: np.ndarray, bypass: bool) -> None:
        self._batch, self._advantages, self._rewards, self._bypass = batch, advantages, rewards, bypass
        self._seen: dict[str, Tensor] = {}
        self._before_update = torch.zeros_like(batch.rollout.log_probs, dtype=torch.int64)

    def __call__(self, part: ActorBatch, terms: Terms, *, before_update: bool) -> None:
        assert part.places is not None, "an update that is recorded numbers its terms"
        self._before_update.view(-1)[part.places] = int(before_update)
        self._put("current_log_probs", part, terms.log_prob)
        self._put("stds", part, terms.std)
        for name, kl in (("current_old_kl", terms.old_kl), ("current_rollout_kl", terms.rollout_kl)):
            if kl is not None:
                self._put(name, part, kl)

    def terms(self) -> DumpedTerms:
        """All terms of the batch, on the CPU."""
        batch, rollout = self._batch, self._batch.rollout
        assert batch.old_log_probs is not None
        seen = dict(self._seen)
        kl = exact_kl(batch.old_means, rollout.window.means, seen["stds"])
        if kl is not None:
            seen["old_rollout_kl"] = kl
        if self._bypass:  # else the gap is that of the old policy, which learned nothing from the batch
            seen["before_update"] = self._before_update
        known: dict[str, Any] = dict(seen)
        terms = DumpedTerms(
            rollout_log_probs=rollout.log_probs,
            old_log_probs=batch.old_log_probs,
            advantages=self._advantages,
            rewards=torch.as_tensor(self._rewards, dtype=torch.float32),
            timesteps=rollout.window.timesteps,
            sigmas=rollout.window.sigmas,
            sigmas_next=rollout.window.sigmas_next,
            step_indices=rollout.window.step_indices,
            group_ids=rollout.group_ids,
            policy_versions=rollout.policy_versions,
            worker_ids=rollout.worker_ids,
            num_elements=rollout.num_elements,
            bypass=self._bypass,
            **known,
        )
        on_cpu: dict[str, Any] = {name: value.cpu() for name, value in terms.tensors().items()}
        return replace(terms, **on_cpu)

    def _put(self, name: str, part: ActorBatch, values: Tensor) -> None:
        assert part.places is not None
        shape = self._batch.rollout.log_probs.shape
        column = self._seen.setdefault(name, values.new_full(shape, math.nan))
        column.view(-1)[part.places] = values.detach()


def save_terms(folder: Path, step: int, terms: DumpedTerms | None, actor: ActorConfig) -> None:
    """Write the terms of a training step, of all ranks, to a file in `folder`; every rank has to call.

    Args:
        folder: the folder of the files.
        step: the training step.
        terms: those of this rank; None if it has no samples.
        actor: the keys of the loss.

    Raises:
        BackendError: the folder cannot be written to.
    """
    by_rank = distributed.gather_on_main(terms, "the log-probs of a step")
    if by_rank is not None:
        all_terms = DumpedTerms.concatenate([terms for terms in by_rank if terms is not None])
        loss = dumps.LoggedLoss(
            loss_mode=actor.loss_mode, clip_ratio=actor.clip_ratio, adv_clip_max=actor.adv_clip_max
        )
        dumps.save(folder, step, all_terms, loss)
