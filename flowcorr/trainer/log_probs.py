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
from flowcorr.actor.update import Update
from flowcorr.algorithm.terms import exact_kl
from flowcorr.config.schema import ActorConfig
from flowcorr.dumps import DumpedTerms
from flowcorr.records import ActorBatch


def sampled_terms(
    batch: ActorBatch, *, advantages: Tensor, rewards: np.ndarray, bypass: bool
) -> DumpedTerms | None:
    """All terms of a batch, on the CPU, as they are before its update; None of a rank without samples.

    Args:
        batch: with the log-probs of the old policy.
        advantages: `[B]`, before rejection.
        rewards: `[B]`.
        bypass: whether the training step is in bypass mode.
    """
    rollout = batch.rollout
    if not rollout.num_samples:
        return None
    assert batch.old_log_probs is not None
    dumped = DumpedTerms(
        rollout_log_probs=rollout.log_probs,
        old_log_probs=batch.old_log_probs,
        advantages=advantages,
        rewards=torch.as_tensor(rewards, dtype=torch.float32),
        timesteps=rollout.window.timesteps,
        sigmas=rollout.window.sigmas,
        sigmas_next=rollout.window.sigmas_next,
        step_indices=rollout.window.step_indices,
        group_ids=rollout.group_ids,
        policy_versions=rollout.policy_versions,
        worker_ids=rollout.worker_ids,
        num_elements=rollout.num_elements,
        bypass=bypass,
    )
    on_cpu: dict[str, Any] = {name: value.cpu() for name, value in dumped.tensors().items()}
    return replace(dumped, **on_cpu)


def logged_terms(sampled: DumpedTerms, batch: ActorBatch, update: Update) -> DumpedTerms:
    """Add each term's last score in an update to the terms of its batch, on the CPU.

    Args:
        sampled: the terms as they were before the update.
        batch: the batch of the update.
        update: the update, of a run with `trainer.dump_log_probs`.
    """
    rollout, shape = batch.rollout, batch.rollout.log_probs.shape
    columns: dict[str, Any] = {}
    before_update = torch.zeros_like(rollout.log_probs, dtype=torch.int64)
    for part in update.parts:
        assert part.terms is not None, "a run that dumps its terms scores all samples"
        assert part.places is not None
        terms, places = part.terms, part.places.flatten()
        before_update.view(-1)[places] = int(part.before)
        scored = {
            "current_log_probs": terms.log_prob,
            "stds": terms.std,
            "current_old_kl": terms.old_kl,
            "current_rollout_kl": terms.rollout_kl,
            "drift_squares": terms.drift_square,
            "gradient_squares": terms.gradient_square,
        }
        for name, values in scored.items():
            if values is not None:
                column = columns.setdefault(name, values.new_full(shape, math.nan))
                column.view(-1)[places] = values.flatten()
    kl = exact_kl(batch.old_means, rollout.window.means, columns["stds"])
    if kl is not None:
        columns["old_rollout_kl"] = kl
    if sampled.bypass:  # else the gap is that of the old policy, which learned nothing from the batch
        columns["before_update"] = before_update
    return replace(sampled, **{name: column.cpu() for name, column in columns.items()})


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
