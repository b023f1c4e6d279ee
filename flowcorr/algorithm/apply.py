"""From a configuration to one call of the correction, the same for both modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowcorr.advantages import drop_small_groups, recentre, rejection_stats
from flowcorr.algorithm.noise_floor import clip_noise
from flowcorr.config.older_verl import older_metrics
from flowcorr.config.schema import ActorConfig, Config
from flowcorr.correction import RolloutCorrectionConfig, compute_rollout_correction_and_rejection_mask
from flowcorr.correction.bounds import SECTION
from flowcorr.correction.robust import Noise
from flowcorr.errors import ConfigError
from flowcorr.losses import clip_by_term, loss_of, resolve_loss
from flowcorr.metrics import Metrics
from flowcorr.records import Terms


def correct(
    terms: Terms,
    config: RolloutCorrectionConfig,
    *,
    group_ids: Tensor | None = None,
    actor_config: ActorConfig | None = None,
    num_steps: int | None = None,
    noise: Mapping[str, Noise] | None = None,
) -> tuple[Terms, Metrics]:
    """Weigh and reject terms as `config` says, by old (decoupled) or current (bypass) against rollout log-probs.

    Args:
        terms: of whole windows `[B, T]`, or of single steps `[b]`, each of which is a window of its own.
        config: the correction.
        group_ids: `[B]`, the groups of the samples, which `rejection_groups` reads.
        actor_config: the loss, against whose clip range noise is measured.
        num_steps: steps of the schedule, for the metrics by step; None reads it off the batch.
        noise: in bypass mode, the noise of earlier training steps, see `MeasuredBands.noise`; without it, `auto`
            thresholds and z-scores reject nothing.

    Returns:
        The terms with `keep`, with `weight` if weights multiply the loss, and with other advantages under
        `rejection_groups`; and the `rollout_corr/*` metrics, with rejection as it was before groups were dropped.

    Raises:
        ConfigError: `config` leaves the mode open.
        BatchError: shapes differ, or a KL is missing.
    """
    if config.mode == "off":
        return terms, Metrics()
    if config.mode == "auto":
        raise ConfigError(
            f"{SECTION}.bypass_mode='auto' cannot correct a single batch; take each training step's correction from "
            "flowcorr.algorithm.AutoMode, as the trainer does"
        )
    shape, windows = terms.log_prob.shape, terms.windows()
    target, kl = windows.old_log_prob, windows.old_rollout_kl
    judged_by: dict[str, Any] = {}
    if config.mode == "bypass":
        # Detached: weights are constants of the loss; their own gradient would move the policy to change the weights.
        target = windows.log_prob.detach()
        kl = None if windows.rollout_kl is None else windows.rollout_kl.detach()
        slack = None if actor_config is None else slack_of(windows, actor_config, config)
        judged_by = {"noise": noise or {}, "slack": slack}
    correction = compute_rollout_correction_and_rejection_mask(
        target,
        windows.rollout_log_prob,
        windows.keep,
        step_kl=kl,
        step_indices=windows.step_index,
        num_elements=windows.num_elements,
        num_steps=num_steps,
        **judged_by,
        **config.options,
    )
    metrics, weight, keep = correction.metrics, terms.weight, correction.keep
    if config.log_legacy_names:
        log_probs = (target, windows.rollout_log_prob, windows.keep)
        metrics = metrics.merge(older_metrics(metrics, *log_probs, config, windows.num_elements))
    if actor_config is not None:
        metrics = metrics.merge(_noise(windows, target, kl, actor_config))
    if correction.weights is not None:
        weights = correction.weights.view(shape)
        weight = weights if weight is None else weight * weights
    if config.rejection_groups == "none":
        return replace(terms, weight=weight, keep=keep.view(shape)), metrics
    assert group_ids is not None, "only whole batches get a correction that looks at groups"
    if config.rejection_groups == "drop_small":
        keep = drop_small_groups(keep, group_ids)
    advantages = recentre(terms.advantage[:, 0], group_ids, keep)[:, None].expand_as(keep)
    metrics = metrics.merge(rejection_stats(keep, group_ids))
    return replace(terms, advantage=advantages, weight=weight, keep=keep), metrics


def slack_of(terms: Terms, actor_config: ActorConfig, config: RolloutCorrectionConfig) -> Tensor:
    """Largest movement of each log-ratio `[B, T]` by learning: the loss's clip range, nats per latent element.

    If the loss clips the sum over a window, its kept steps share the range. A loss without a range adds nothing, nor
    does one with a cap, which bounds one side only.
    """
    loss = loss_of(actor_config, config)
    limit = loss.ratio_limit(actor_config)
    nothing = torch.zeros_like(terms.rollout_log_prob, dtype=torch.float64)
    if loss.limit is None or limit is None or loss.limit.is_cap:
        return nothing
    in_ratio = torch.as_tensor(clip_by_term(limit, terms.step_index), dtype=torch.float64).to(nothing.device)
    nats = loss.log_ratio(torch.ones_like(nothing), nothing, terms.std.double())  # of one nat of log-ratio
    slack = in_ratio.log1p() / nats
    if actor_config.ratio_level == "trajectory_sum":
        keep = torch.ones_like(nothing) if terms.keep is None else terms.keep
        slack = slack / keep.sum(1, keepdim=True).clamp(min=1)
    return slack.where(slack.isfinite(), 0.0)  # the std of a step may not be known


def _noise(terms: Terms, target: Tensor, kl: Tensor | None, actor_config: ActorConfig) -> Metrics:
    """Metrics of the drift relative to the clip range; empty if the loss has none, or if its ratio is unknown."""
    loss = resolve_loss(actor_config)
    limit = loss.ratio_limit(actor_config)
    if limit is None or (loss.needs_kl and kl is None):
        return Metrics()
    return clip_noise(
        loss.log_ratio(target - terms.rollout_log_prob, kl, terms.std),
        terms.keep,
        actor_config.ratio_level,
        clip_by_term(limit, terms.step_index),
    )


def sees_windows(actor_config: ActorConfig, correction: RolloutCorrectionConfig) -> bool:
    """Whether the loss takes whole windows `[b, T]`: for ratios, weights or rejection of trajectories."""
    return actor_config.ratio_level != "step" or (
        correction.mode in ("bypass", "auto") and correction.bypass_scope == "trajectory"
    )


def needs_old_means(config: Config) -> bool:
    """Whether the actor's recomputation must return its step means (decoupled mode)."""
    correction = config.algorithm.rollout_correction
    loss = loss_of(config.actor, correction)
    centres = correction.score_centering and (correction.applies_weights or loss.adds_kl)
    return loss.needs_kl or correction.needs_means or centres


def needs_rollout_means(config: Config) -> bool:
    """Whether the rollout engine must return its step means."""
    correction = config.algorithm.rollout_correction
    in_loss = correction.mode in ("bypass", "auto") and loss_of(config.actor, correction).needs_kl
    return in_loss or correction.needs_means or correction.score_centering
