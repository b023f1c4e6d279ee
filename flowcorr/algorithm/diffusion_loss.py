"""The loss of one micro-batch, with the correction inside it in bypass mode."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flowcorr.algorithm.apply import correct, exact_kl
from flowcorr.algorithm.clip_center import drift_by_step
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import BatchError
from flowcorr.losses import kl_to_reference, reinforce, resolve_loss
from flowcorr.metrics import Metrics, mean
from flowcorr.records import BatchStep, LossOutput, PolicyStep


def diffusion_loss(
    policy_step: PolicyStep,
    batch_step: BatchStep,
    actor_config: ActorConfig,
    correction_config: RolloutCorrectionConfig | None = None,
    *,
    num_steps: int | None = None,
) -> LossOutput:
    """Policy loss of single steps `[b]`, or of whole windows `[b, T]`, as a sum.

    In bypass mode the terms are first corrected on current against rollout log-probs: each on its own for
    `[b]`, over its trajectory for `[b, T]`. With `ppo_clip` they are only rejected, as the ratio is the
    importance weight; with `reinforce` they are weighed as well.

    Args:
        policy_step: the current policy's scores.
        batch_step: the data; `old_log_prob` and, for some losses, `old_mean` are the proximal policy's.
        actor_config: the loss.
        correction_config: the correction, or None.
        num_steps: steps of the schedule, for the metrics by step; None reads it off the batch, which centres of
            the clip range do not allow.

    Returns:
        The loss sum over kept terms, its counts, and metrics under `actor/` and, in bypass, `rollout_corr/`.

    Raises:
        BatchError: shapes differ, or a step mean or `num_steps` is missing.
    """
    corrected = Metrics()
    bypass = correction_config is not None and correction_config.bypass_mode
    if correction_config is not None and bypass:
        batch_step, corrected = _correct_terms(
            policy_step, batch_step, correction_config, actor_config, num_steps
        )
    drift = None
    if batch_step.clip_center is not None:
        drift = _drift(policy_step, batch_step, actor_config, num_steps)
    if correction_config is not None and bypass and correction_config.loss_type == "reinforce":
        output = reinforce(
            policy_step.log_prob,
            batch_step.advantage,
            adv_clip_max=actor_config.adv_clip_max,
            weight=batch_step.weight,
            keep=batch_step.keep,
            old_log_prob=batch_step.old_log_prob,
        )
    else:
        output = resolve_loss(actor_config.loss_mode)(policy_step, batch_step, actor_config)
    if actor_config.kl_coef and batch_step.reference_mean is not None:
        output = _with_reference_kl(output, policy_step, batch_step, actor_config)
    return replace(output, metrics=output.metrics.merge(corrected), drift=drift)


def _correct_terms(
    policy_step: PolicyStep,
    batch_step: BatchStep,
    config: RolloutCorrectionConfig,
    actor_config: ActorConfig,
    num_steps: int | None,
) -> tuple[BatchStep, Metrics]:
    """Weights and rejection inside the loss; `[b]` terms are trajectories of one step."""
    single = policy_step.log_prob.dim() == 1

    def window(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or not single else tensor.unsqueeze(1)

    correction = correct(
        policy_step.log_prob.detach().unsqueeze(1) if single else policy_step.log_prob.detach(),
        batch_step.rollout_log_prob.unsqueeze(1) if single else batch_step.rollout_log_prob,
        config,
        mask=window(batch_step.keep),
        step_index=batch_step.step_index.unsqueeze(1) if single else batch_step.step_index,
        target_mean=window(policy_step.mean.detach()),
        rollout_mean=window(batch_step.rollout_mean),
        std=window(policy_step.std),
        actor_config=actor_config,
        num_elements=policy_step.mean[(0,) * policy_step.log_prob.dim()].numel(),
        num_steps=num_steps,
        clip_center=window(batch_step.clip_center),
    )
    weights, keep = correction.weights, correction.keep
    if single:
        weights, keep = None if weights is None else weights.squeeze(1), keep.squeeze(1)
    return replace(batch_step, weight=weights, keep=keep), correction.metrics


def _drift(
    policy_step: PolicyStep, batch_step: BatchStep, actor_config: ActorConfig, num_steps: int | None
) -> Tensor:
    """`LossOutput.drift`: the kept log-ratios by step index, as the loss centres them."""
    log_ratio = policy_step.log_prob.detach() - batch_step.old_log_prob
    if actor_config.loss_mode == "grpo_guard" and batch_step.old_mean is not None:
        log_ratio = log_ratio + exact_kl(policy_step.mean.detach(), batch_step.old_mean, policy_step.std)
    keep = torch.ones_like(log_ratio, dtype=torch.bool) if batch_step.keep is None else batch_step.keep
    if num_steps is None:
        raise BatchError(
            "clip centres need num_steps, the steps of the schedule: drifts of micro-batches are added up"
        )
    return drift_by_step(log_ratio, keep, batch_step.step_index, num_steps)


def _with_reference_kl(
    output: LossOutput, policy_step: PolicyStep, batch_step: BatchStep, actor_config: ActorConfig
) -> LossOutput:
    """Add `kl_coef` times the KL to the reference, over the terms that were not rejected."""
    assert batch_step.reference_mean is not None
    keep = torch.isfinite(policy_step.log_prob.detach())
    if batch_step.keep is not None:
        keep = keep & batch_step.keep
    kl = kl_to_reference(
        policy_step.mean,
        batch_step.reference_mean,
        policy_step.std,
        policy_step.step,
        weighting=actor_config.kl_weighting,
        keep=keep,
    ).sum()
    metrics = Metrics.from_stats({"actor/kl_loss": mean(kl, keep.sum())})
    return replace(
        output, loss_sum=output.loss_sum + actor_config.kl_coef * kl, metrics=output.metrics.merge(metrics)
    )
