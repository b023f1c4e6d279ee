"""The terms from which the losses of a training step were computed, see `flowcorr.dumps`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowcorr.dumps import LoggedTerms
from flowcorr.records import ActorBatch, PolicyStep
from flowcorr.sde import step_kl


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

    def __call__(self, part: ActorBatch, policy: PolicyStep) -> None:
        self._put("current_log_probs", part, policy.log_prob)
        self._put("stds", part, policy.std)
        for name, means in (("current_old_kl", part.old_means), ("current_rollout_kl", part.rollout.means)):
            if means is not None:
                self._put(name, part, step_kl(policy.mean.detach(), means, policy.std))

    def terms(self) -> LoggedTerms:
        """All terms of the batch, on the CPU."""
        batch, rollout = self._batch, self._batch.rollout
        assert batch.old_log_probs is not None
        seen = dict(self._seen)
        if batch.old_means is not None and rollout.means is not None:
            seen["old_rollout_kl"] = step_kl(batch.old_means, rollout.means, seen["stds"])
        terms = LoggedTerms(
            rollout_log_probs=rollout.log_probs,
            old_log_probs=batch.old_log_probs,
            advantages=self._advantages,
            rewards=torch.as_tensor(self._rewards, dtype=torch.float32),
            timesteps=rollout.timesteps,
            sigmas=rollout.sigmas,
            sigmas_next=rollout.sigmas_next,
            step_indices=rollout.step_indices,
            group_ids=rollout.group_ids,
            policy_versions=rollout.policy_versions,
            num_elements=rollout.num_elements,
            bypass=self._bypass,
            **seen,
        )
        on_cpu: dict[str, Any] = {name: value.cpu() for name, value in terms.tensors().items()}
        return replace(terms, **on_cpu)

    def _put(self, name: str, part: ActorBatch, values: Tensor) -> None:
        assert part.places is not None, "an update that is recorded numbers its terms"
        shape = self._batch.rollout.log_probs.shape
        column = self._seen.setdefault(name, values.new_full(shape, math.nan))
        column.view(-1)[part.places] = values.detach()
