"""From a configuration to one call of the correction, the same for both modes."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr.config.schema import ActorConfig, Config
from flowcorr.correction import (
    Correction,
    RolloutCorrectionConfig,
    compute_rollout_correction_and_rejection_mask,
)
from flowcorr.losses import needs_means
from flowcorr.metrics import Metrics, mean
from flowcorr.sde.transition import mean_over_elements


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
        actor_config: the loss, whose clip range `clip_noise_fraction` is measured against.
        num_elements: `D`.
        num_steps: steps of the schedule, for the metrics by step.
    """
    step_kl = None
    if target_mean is not None and rollout_mean is not None and std is not None:
        step_kl = mean_over_elements((target_mean - rollout_mean).square(), std.dim()) / (2 * std.square())
    guarded = actor_config is not None and actor_config.loss_mode == "grpo_guard"
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
        step_kl=step_kl,
        step_indices=step_index,
        num_elements=num_elements,
        num_steps=num_steps,
        clip_ratio=None if actor_config is None or guarded else actor_config.clip_ratio,
        log_legacy_names=config.log_legacy_names,
    )
    if not guarded or step_kl is None or std is None:
        return correction
    assert actor_config is not None
    log_ratio = (target_log_prob - rollout_log_prob + step_kl) * std
    return Correction(
        weights=correction.weights,
        keep=correction.keep,
        metrics=correction.metrics.merge(_clip_noise(log_ratio, mask, actor_config.clip_ratio)),
    )


def needs_old_means(config: Config) -> bool:
    """Whether the actor's recomputation must return its step means (decoupled mode)."""
    correction = config.algorithm.rollout_correction
    return needs_means(config.actor.loss_mode) or (correction is not None and correction.needs_means)


def needs_rollout_means(config: Config) -> bool:
    """Whether the rollout engine must return its step means."""
    correction = config.algorithm.rollout_correction
    if correction is None:
        return False
    bypass_loss = correction.bypass_mode and correction.loss_type == "ppo_clip"
    return correction.needs_means or (bypass_loss and needs_means(config.actor.loss_mode))


def _clip_noise(log_ratio: Tensor, mask: Tensor | None, clip_ratio: float) -> Metrics:
    """`clip_noise_fraction` of a loss that does not exponentiate the plain log-ratio."""
    valid = torch.isfinite(log_ratio) if mask is None else mask & torch.isfinite(log_ratio)
    excess = torch.where(valid, log_ratio, 0.0).double().expm1()
    outside = (excess.abs() > clip_ratio).sum()
    return Metrics.from_stats({"rollout_corr/clip_noise_fraction": mean(outside, valid.sum())})
