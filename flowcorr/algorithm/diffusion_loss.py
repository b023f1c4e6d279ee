"""The loss of one micro-batch, with the correction inside it in bypass mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flowcorr.algorithm.apply import correct, sees_windows
from flowcorr.algorithm.centering import centred
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import OFF, RolloutCorrectionConfig
from flowcorr.correction.robust import Noise
from flowcorr.errors import BatchError
from flowcorr.losses import loss_of
from flowcorr.metrics import Metrics, mean
from flowcorr.records import LossOutput, Terms


def diffusion_loss(
    terms: Terms,
    actor_config: ActorConfig,
    correction_config: RolloutCorrectionConfig = OFF,
    *,
    num_steps: int | None = None,
    noise: Mapping[str, Noise] | None = None,
    cps_unscaled: bool = False,
) -> LossOutput:
    """Policy loss of single steps `[b]`, or of whole windows `[b, T]`, as a sum.

    In bypass mode the terms are first corrected on current against rollout log-probs: each on its own with
    `bypass_scope: step`, over its trajectory with `trajectory`. With `ppo_clip` they are only rejected, as the ratio is
    the importance weight; with `reinforce` they are weighed as well.

    Args:
        terms: the numbers of the steps; `old_log_prob` and `old_kl` are of the proximal policy.
        actor_config: the loss.
        correction_config: the correction.
        num_steps: steps of the schedule, for the metrics by step; None reads it off the batch.
        noise: of earlier training steps, for `auto` thresholds in bypass mode, see `MeasuredBands.noise`.
        cps_unscaled: whether log-probs are those of `sampling.cps_unscaled`, for score centering.

    Returns:
        The loss sum over kept terms, its counts, metrics of the update and, in bypass, of the correction.

    Raises:
        BatchError: shapes differ, a KL is missing, or a user's loss returns something other than a `LossOutput`.
    """
    measured = Metrics()
    # Decoupled mode corrected the whole batch before the update; its weights and mask are in `terms` already.
    if correction_config.mode == "bypass":
        if not sees_windows(actor_config, correction_config):
            terms = terms.per_term()
        terms, measured = correct(
            terms, correction_config, actor_config=actor_config, num_steps=num_steps, noise=noise
        )
    loss = loss_of(actor_config, correction_config)
    if correction_config.score_centering:
        # After the correction, since the mean to subtract is the mean of the weighted score.
        terms = centred(terms, correction_config, loss, cps_unscaled=cps_unscaled)
    output = loss.objective(terms, actor_config)
    if problem := _problem_of(output, terms):
        raise BatchError(f"actor.loss_mode={actor_config.loss_mode!r} returned {problem}")
    if actor_config.kl_coef and terms.reference_kl is not None:
        output = _with_reference_kl(output, terms, terms.reference_kl, actor_config)
    return replace(output, correction_metrics=measured, keep=terms.keep)


def _problem_of(output: object, terms: Terms) -> str:
    """The problem of the output of a loss, in words; empty if there is none."""
    if not isinstance(output, LossOutput) or not isinstance(output.metrics, Metrics):
        wrong = output.metrics if isinstance(output, LossOutput) else output
        return f"a {type(wrong).__name__}; return a flowcorr.records.LossOutput with flowcorr.metrics.Metrics"
    if not isinstance(output.loss_sum, Tensor):
        return (
            f"a loss_sum of type {type(output.loss_sum).__name__}; compute it from terms.log_prob, undetached"
        )
    for name in ("loss_sum", "count_all", "count_kept"):
        value = getattr(output, name)
        if isinstance(value, Tensor) and value.dim():
            return f"a {name} of shape {list(value.shape)}; sum it over the terms that count_kept counts"
    learns = output.loss_sum.requires_grad or not terms.log_prob.requires_grad
    if not learns and output.count_kept > 0:
        return (
            "a loss_sum without a gradient, which teaches nothing; compute it from terms.log_prob, undetached"
        )
    return ""


def _with_reference_kl(output: LossOutput, terms: Terms, kl: Tensor, actor_config: ActorConfig) -> LossOutput:
    """Add `kl_coef` times the KL to the reference, over the terms that were not rejected.

    `kl_weighting: flow_grpo` divides by `2 c^2` with `s = c sqrt(step)` and so multiplies the exact KL by `step`:
    the unit of coefficients published with Flow-GRPO, arXiv:2505.05470, section 4.2.
    """
    keep = torch.isfinite(terms.log_prob.detach()) & torch.isfinite(kl.detach())
    if terms.keep is not None:
        keep = keep & terms.keep
    kl = torch.where(keep, kl, 0.0)
    kl_sum = (kl * terms.step if actor_config.kl_weighting == "flow_grpo" else kl).sum()
    metrics = Metrics({"actor/kl_loss": mean(kl_sum, keep.sum())})
    return replace(
        output,
        loss_sum=output.loss_sum + actor_config.kl_coef * kl_sum,
        metrics=output.metrics.merge(metrics),
    )
