"""From a configuration to one call of the correction, the same for both modes."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flowcorr.algorithm.noise_floor import clip_noise
from flowcorr.config.schema import ActorConfig, Config
from flowcorr.correction import (
    Correction,
    RolloutCorrectionConfig,
    compute_rollout_correction_and_rejection_mask,
)
from flowcorr.correction.bounds import SECTION
from flowcorr.errors import ConfigError
from flowcorr.losses import clip_by_term, loss_of, resolve_loss
from flowcorr.sde import step_kl


def correct(
    target_log_prob: Tensor,
    rollout_log_prob: Tensor,
    config: RolloutCorrectionConfig,
    *,
    mask: Tensor | None,
    step_index: Tensor,
    target_mean: Tensor | None = None,
    rollout_mean: Tensor | None = None,
    std: Tensor | None = None,
    actor_config: ActorConfig | None = None,
    num_elements: int | None = None,
    num_steps: int | None = None,
) -> Correction:
    """Correct `[B, T]` terms as `config` says; weights come back only where they multiply the loss.

    Args:
        target_log_prob: of the old (decoupled) or current (bypass) policy, nats per latent element.
        rollout_log_prob: of the rollout policy.
        config: the correction.
        mask: bool, terms that take part, or None for all.
        step_index: int64, the steps' places in the schedule.
        target_mean, rollout_mean: `[B, T, *L]` step means, where both are known.
        std: full standard deviations of the steps, with the means.
        actor_config: the loss, against whose clip range noise is measured.
        num_elements: `D`.
        num_steps: steps of the schedule, for the metrics by step.

    Raises:
        ConfigError: `config` leaves the mode open.
    """
    if config.mode == "auto":
        raise ConfigError(
            f"{SECTION}.bypass_mode='auto' cannot correct a single batch; take each training step's correction from "
            "flowcorr.algorithm.AutoMode, as the trainer does"
        )
    kl = None
    if target_mean is not None and rollout_mean is not None and std is not None:
        kl = step_kl(target_mean, rollout_mean, std)
    correction = compute_rollout_correction_and_rejection_mask(
        target_log_prob,
        rollout_log_prob,
        mask,
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_apply=config.applies_weights,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
        rollout_token_veto_threshold=config.rollout_token_veto_threshold,
        log_ratio_scale=config.log_ratio_scale,
        step_kl=kl,
        step_indices=step_index,
        num_elements=num_elements,
        num_steps=num_steps,
        log_legacy_names=config.log_legacy_names,
    )
    if actor_config is None:
        return correction
    loss = resolve_loss(actor_config)
    limit = loss.ratio_limit(actor_config)
    if limit is None or (loss.needs_means and kl is None):
        return correction
    noise = clip_noise(
        loss.log_ratio(target_log_prob - rollout_log_prob, kl, std),
        mask,
        actor_config.ratio_level,
        clip_by_term(limit, step_index),
    )
    return replace(correction, metrics=correction.metrics.merge(noise))


def needs_old_means(config: Config) -> bool:
    """Whether the actor's recomputation must return its step means (decoupled mode)."""
    correction = config.algorithm.rollout_correction
    of_loss = loss_of(config.actor, correction).needs_means
    return of_loss or (correction is not None and correction.needs_means)


def needs_rollout_means(config: Config) -> bool:
    """Whether the rollout engine must return its step means."""
    correction = config.algorithm.rollout_correction
    if correction is None:
        return False
    in_loss = correction.mode != "decoupled" and loss_of(config.actor, correction).needs_means
    return in_loss or correction.needs_means
