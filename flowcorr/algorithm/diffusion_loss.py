"""The loss of one micro-batch, with the correction inside it in bypass mode."""

from __future__ import annotations

from dataclasses import replace

import torch

from flowcorr.algorithm.apply import correct
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.losses import kl_to_reference, loss_of
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
        num_steps: steps of the schedule, for the metrics by step; None reads it off the batch.

    Returns:
        The loss sum over kept terms, its counts, metrics of the update and, in bypass, those of the correction.

    Raises:
        BatchError: shapes differ, or a step mean is missing.
    """
    measured = Metrics()
    if correction_config is not None and correction_config.mode == "bypass":
        batch_step, measured = _correct_terms(
            policy_step, batch_step, correction_config, actor_config, num_steps
        )
    output = loss_of(actor_config, correction_config).objective(policy_step, batch_step, actor_config)
    if actor_config.kl_coef and batch_step.reference_mean is not None:
        output = _with_reference_kl(output, policy_step, batch_step, actor_config)
    return replace(output, correction_metrics=measured)


def _correct_terms(
    policy_step: PolicyStep,
    batch_step: BatchStep,
    config: RolloutCorrectionConfig,
    actor_config: ActorConfig,
    num_steps: int | None,
) -> tuple[BatchStep, Metrics]:
    """Weights and rejection inside the loss; `[b]` terms are trajectories of one step."""
    policy, batch = policy_step.detach().windows(), batch_step.windows()
    correction = correct(
        policy.log_prob,
        batch.rollout_log_prob,
        config,
        mask=batch.keep,
        step_index=batch.step_index,
        target_mean=policy.mean,
        rollout_mean=batch.rollout_mean,
        std=policy.std,
        actor_config=actor_config,
        num_elements=policy.mean.shape[2:].numel(),
        num_steps=num_steps,
    )
    weights, keep = batch_step.weight, correction.keep.view_as(policy_step.log_prob)
    if correction.weights is not None:
        corrected = correction.weights.view_as(policy_step.log_prob)
        weights = corrected if weights is None else weights * corrected
    return replace(batch_step, weight=weights, keep=keep), correction.metrics


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
