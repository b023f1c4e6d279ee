"""Decoupled mode: drift 1 is corrected once, over the whole batch, before the first update."""

from __future__ import annotations

from dataclasses import replace

from flowcorr.algorithm.apply import correct
from flowcorr.algorithm.terms import batch_terms
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.bounds import SECTION
from flowcorr.errors import BatchError, ConfigError
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
        The batch with `rollout_is_weights`, `keep` and, under `rejection_groups`, other advantages; and the
        `rollout_corr/*` metrics, with rejection as it was before groups were dropped.

    Raises:
        ConfigError: the correction is of bypass mode, in which the loss applies it.
        BatchError: `old_log_probs` are missing, or shapes differ.
    """
    if config.mode == "bypass":
        raise ConfigError(
            f"{SECTION}.bypass_mode=true is a correction that the loss applies, and here weights would count twice; "
            "call apply_bypass_mode_to_diffusion_batch, or set bypass_mode: false"
        )
    if batch.old_log_probs is None:
        raise BatchError(
            "batch.old_log_probs is None; recompute them with the actor before the correction, "
            "or set algorithm.rollout_correction.bypass_mode: true"
        )
    terms, metrics = correct(
        batch_terms(batch),
        config,
        group_ids=batch.rollout.group_ids,
        actor_config=actor_config,
        num_steps=num_steps,
    )
    corrected = replace(
        batch, advantages=terms.advantage[:, 0], rollout_is_weights=terms.weight, keep=terms.keep
    )
    return corrected, metrics
