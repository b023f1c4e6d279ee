"""Terms of a batch, from its records: log-probs as they are, and exact KLs computed from step means."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flowcorr.records import ActorBatch, Scores, Terms
from flowcorr.sde import step_kl


def batch_terms(
    batch: ActorBatch,
    scores: Scores | None = None,
    reference_means: Tensor | None = None,
    *,
    centres: bool = False,
) -> Terms:
    """Collect the terms `[B, T]` of a batch that has `old_log_probs`.

    Args:
        batch: the samples.
        scores: of the current policy, with means and their graph; None before the update.
        reference_means: `[B, T, *L]`, of the reference policy, or None.
        centres: whether the loss reads the gradient of `rollout_kl`, which holds on to the difference of the means.
    """
    rollout, window, old_log_probs = batch.rollout, batch.rollout.window, batch.old_log_probs
    assert old_log_probs is not None, "old_log_probs come from the correction, before the update"
    terms = Terms(
        log_prob=old_log_probs,
        old_log_prob=old_log_probs,
        rollout_log_prob=rollout.log_probs,
        advantage=batch.advantages[:, None].expand_as(old_log_probs),
        std=torch.full_like(window.sigmas, torch.nan) if window.stds is None else window.stds,
        step=window.step_sizes,
        step_index=window.step_indices,
        sigma=window.sigmas,
        worker=None if rollout.worker_ids is None else rollout.worker_ids[:, None].expand_as(old_log_probs),
        weight=batch.rollout_is_weights,
        keep=batch.keep,
        num_elements=rollout.num_elements,
    )
    if scores is None:
        return replace(terms, old_rollout_kl=exact_kl(batch.old_means, window.means, window.stds))
    # Only KLs that a loss differentiates keep the means' graph: it holds latents of every step until the backward pass.
    means, stds = scores.means, scores.stds
    detached = None if means is None else means.detach()
    return replace(
        terms,
        log_prob=scores.log_probs,
        std=stds,
        old_kl=exact_kl(means, batch.old_means, stds),
        rollout_kl=exact_kl(means if centres else detached, window.means, stds),
        old_rollout_kl=exact_kl(batch.old_means, window.means, stds),
        reference_kl=exact_kl(means, reference_means, stds),
    )


def exact_kl(means: Tensor | None, other_means: Tensor | None, stds: Tensor | None) -> Tensor | None:
    """`sde.step_kl` of step means; None if means or stds are missing."""
    if means is None or other_means is None or stds is None:
        return None
    return step_kl(means, other_means.detach(), stds)
