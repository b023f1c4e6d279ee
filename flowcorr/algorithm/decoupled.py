"""Decoupled mode: drift 1 is corrected once, over the whole batch, before the first update."""

from __future__ import annotations

from dataclasses import replace

from flowcorr.advantages import drop_small_groups, recentre, rejection_stats
from flowcorr.algorithm.apply import correct
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import BatchError
from flowcorr.metrics import Metrics
from flowcorr.records import ActorBatch


def apply_rollout_correction_to_diffusion_batch(
    batch: ActorBatch,
    config: RolloutCorrectionConfig,
    *,
    actor_config: ActorConfig | None = None,
    num_steps: int | None = None,
) -> tuple[ActorBatch, Metrics]:
    """Weigh and reject the terms of a whole batch by old against rollout log-probs.

    Args:
        batch: with `old_log_probs` `[B, T]` recomputed by the actor.
        config: the correction, with `bypass_mode` off.
        actor_config: the loss, whose clip range `clip_noise_fraction` is measured against.
        num_steps: steps of the schedule, for the metrics by step; None reads it off the batch.

    Returns:
        The batch with `rollout_is_weights` and `keep`, with `rejection_groups` other advantages as well, and the
        `rollout_corr/*` metrics; those of rejection are from before groups are dropped.

    Raises:
        BatchError: `old_log_probs` are missing, or shapes differ.
    """
    if batch.old_log_probs is None:
        raise BatchError(
            "batch.old_log_probs is None; recompute them with the actor before the correction, "
            "or set algorithm.rollout_correction.bypass_mode: true"
        )
    rollout = batch.rollout
    correction = correct(
        batch.old_log_probs,
        rollout.log_probs,
        config,
        mask=batch.keep,
        step_index=rollout.step_indices,
        target_mean=batch.old_means,
        rollout_mean=rollout.means,
        std=rollout.stds,
        actor_config=actor_config,
        num_elements=rollout.num_elements,
        num_steps=num_steps,
    )
    batch = replace(batch, rollout_is_weights=correction.weights, keep=correction.keep)
    if config.rejection_groups == "none":
        return batch, correction.metrics
    keep, group_ids = correction.keep, rollout.group_ids
    if config.rejection_groups == "drop_small":
        keep = drop_small_groups(keep, group_ids)
    advantages = recentre(batch.advantages, group_ids, keep)
    metrics = correction.metrics.merge(rejection_stats(keep, group_ids))
    return replace(batch, advantages=advantages, keep=keep), metrics
