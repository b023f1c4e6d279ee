"""From a configuration to one call of the correction, the same for both modes."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flowcorr.algorithm.noise import clip_noise, term_limit
from flowcorr.config.schema import ActorConfig, Config
from flowcorr.correction import (
    Correction,
    RolloutCorrectionConfig,
    compute_rollout_correction_and_rejection_mask,
)
from flowcorr.correction.bounds import SECTION
from flowcorr.errors import ConfigError
from flowcorr.losses import needs_means
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
    clip_center: Tensor | None = None,
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
        clip_center: what the loss takes log-ratios relative to, or None for 0.

    Raises:
        ConfigError: `config` leaves the mode open.
    """
    if config.bypass_mode == "auto":
        raise ConfigError(
            f"{SECTION}.bypass_mode='auto' is no mode of a batch; take the correction of each training step from "
            "flowcorr.algorithm.AutoMode, as the trainer does"
        )
    step_kl = None
    if target_mean is not None and rollout_mean is not None and std is not None:
        step_kl = exact_kl(target_mean, rollout_mean, std)
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
        log_legacy_names=config.log_legacy_names,
    )
    limit = None if actor_config is None else term_limit(actor_config, step_index)
    if actor_config is None or limit is None:
        return correction
    log_ratio = target_log_prob - rollout_log_prob
    if clip_center is not None:
        log_ratio = log_ratio - clip_center
    if actor_config.loss_mode == "grpo_guard":
        if step_kl is None or std is None:
            return correction
        log_ratio = (log_ratio + step_kl) * std
    noise = clip_noise(log_ratio, mask, actor_config.ratio_level, limit)
    return replace(correction, metrics=correction.metrics.merge(noise))


def exact_kl(mean: Tensor, other_mean: Tensor, std: Tensor) -> Tensor:
    """Exact KL of steps that share their standard deviation, like `std`, nats per latent element."""
    return mean_over_elements((mean - other_mean).square(), std.dim()) / (2 * std.square())


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
