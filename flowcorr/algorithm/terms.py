"""The numbers of a batch's steps, from its records: the one place where step means become exact KLs."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr.records import ActorBatch, Scores, Terms
from flowcorr.sde import step_kl


def batch_terms(
    batch: ActorBatch, scores: Scores | None = None, reference_means: Tensor | None = None
) -> Terms:
    """The terms `[B, T]` of a batch whose `old_log_probs` are known.

    Args:
        batch: the samples.
        scores: of the current policy, with means and their graph; None before the update.
        reference_means: `[B, T, *L]`, of the reference policy, or None.
    """
    rollout, old_log_probs = batch.rollout, batch.old_log_probs
    assert old_log_probs is not None, "old_log_probs come from the correction, before the update"
    unknown = torch.full_like(rollout.sigmas, torch.nan)
    stds = scores.stds if scores is not None else unknown if rollout.stds is None else rollout.stds
    means = None if scores is None else scores.means
    return Terms(
        log_prob=old_log_probs if scores is None else scores.log_probs,
        old_log_prob=old_log_probs,
        rollout_log_prob=rollout.log_probs,
        advantage=batch.advantages[:, None].expand_as(old_log_probs),
        std=stds,
        step=rollout.sigmas - rollout.sigmas_next,
        step_index=rollout.step_indices,
        sigma=rollout.sigmas,
        old_kl=exact_kl(means, batch.old_means, stds),
        rollout_kl=exact_kl(None if means is None else means.detach(), rollout.means, stds),
        reference_kl=exact_kl(means, reference_means, stds),
        old_rollout_kl=exact_kl(batch.old_means, rollout.means, rollout.stds) if scores is None else None,
        weight=batch.rollout_is_weights,
        keep=batch.keep,
        num_elements=rollout.num_elements,
    )


def exact_kl(means: Tensor | None, other_means: Tensor | None, stds: Tensor | None) -> Tensor | None:
    """`sde.step_kl` of step means; None where something is not known."""
    if means is None or other_means is None or stds is None:
        return None
    return step_kl(means, other_means.detach(), stds)
