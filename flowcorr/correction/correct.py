"""One entry for both modes: importance weights, a rejection mask and all metrics of a drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcorr.correction import describe
from flowcorr.correction.bounds import (
    SECTION,
    Criterion,
    parse_criteria,
    parse_veto,
    parse_weights,
    scale_factor,
)
from flowcorr.correction.earlier import Units, judged_by
from flowcorr.correction.ratios import LogRatios, log_ratios, one_sample
from flowcorr.correction.rejection import measured_bounds
from flowcorr.correction.robust import Noise, robust_z
from flowcorr.correction.weights import band_of, batch_mean, capped, raw_weights
from flowcorr.distributed import Group, gather, gather_rows, world_size
from flowcorr.errors import BatchError, ConfigError
from flowcorr.metrics import Metrics, Over
from flowcorr.records import check_shape, check_tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """The outcome of a correction for a batch.

    Attributes:
        weights: `[B, T]` float32, detached, 0 for terms that are masked or not finite; None if weights are off or not
            applied.
        keep: `[B, T]` bool, the terms that the mask has on, are finite, and were not rejected. A weight of zero
            (IcePop) is kept.
        metrics: named `rollout_corr/...`; `metrics.compute()` is the first read by the host.
    """

    weights: Tensor | None
    keep: Tensor
    metrics: Metrics


def compute_rollout_correction_and_rejection_mask(
    target_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor | None = None,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str | Sequence[float] | None = 2.0,
    rollout_is_apply: bool = True,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | Sequence[object] | None = None,
    rollout_token_veto_threshold: float | None = None,
    log_ratio_scale: str | float = 1.0,
    step_kl: Tensor | None = None,
    step_indices: Tensor | None = None,
    num_elements: int | None = None,
    num_steps: int | None = None,
    noise: Mapping[str, Noise] | None = None,
    slack: Tensor | None = None,
    group: Group = None,
) -> Correction:
    """Weigh and reject terms by the drift from the rollout policy to a target policy, and describe the drift.

    With `delta = target - rollout` in nats per latent element, weights, bands and veto act on
    `log_ratio_scale * delta`; `exp` of it is a density ratio only for scale `sum`. Rejection never changes
    weights, and nothing here carries a gradient. A non-finite term is rejected, with its whole sample if weights or a
    rejection mode judge samples.

    Args:
        target_log_prob: `[B, T]`, under the old policy (decoupled mode) or the current one (bypass mode).
        rollout_log_prob: `[B, T]`, under the policy that sampled.
        mask: `[B, T]`, nonzero where a term counts; None for everywhere.
        rollout_is: `token` (`exp(delta)`), `sequence` (`exp(sum_t delta)`), `geometric` (`exp(mean_t delta)`),
            or None. Exponents are held within +-20.
        rollout_is_threshold: a number caps weights, a pair zeroes weights outside it, `inf` changes none.
        rollout_is_apply: False computes weights for the metrics only.
        rollout_is_batch_normalize: divide by the mean weight over all terms (`token`) or samples, of all ranks.
        rollout_rs: a rejection mode, or several chained by commas; see `modes.RS_MODES`.
        rollout_rs_threshold: its threshold, or theirs; see `bounds.parse_criteria`. `auto` is measured on this
            batch, over all ranks, and logged as `rollout_rs_<mode>_threshold_low` and `_high`.
        rollout_token_veto_threshold: a step with a ratio below it rejects its sample.
        log_ratio_scale: `mean`, `sqrt`, `sum` or a number; `sqrt` and `sum` need `num_elements`.
        step_kl: `[B, T]`, exact KL of each step a latent element, for `step_kl`, `seq_kl` (the sum over a
            sample's steps: the KL of its window, by the chain rule) and the bookkeeping check.
        step_indices: `[B, T]`, places in the schedule; adds a row of metrics for each.
        num_elements: `D`, latent elements of a sample.
        num_steps: length of the schedule; without it, `step_indices` cost a host read. On a CPU they are checked
            against it; elsewhere that would cost a read, too.
        noise: by mode, the noise of earlier training steps, from which `auto` bounds and z-scores are taken in place of
            this batch's; needs `step_indices`. A mode or a step that it lacks rejects nothing.
        slack: `[B, T]`, distance that log-ratios may lie beyond such bounds, nats per latent element; None for 0.
        group: ranks that share the batch; one of several may have no samples.

    Raises:
        ConfigError: a choice or threshold is bad.
        BatchError: shapes differ (nothing is broadcast), a tensor that a choice needs is missing, or `step_indices` are
            no places in the schedule.
    """
    tensors = {
        "rollout_log_prob": rollout_log_prob,
        "mask": mask,
        "step_kl": step_kl,
        "step_indices": step_indices,
        "slack": slack,
    }
    _check_shapes(target_log_prob, tensors, may_be_empty=world_size(group) > 1)
    cap = parse_weights(rollout_is, rollout_is_threshold)
    criteria = parse_criteria(rollout_rs, rollout_rs_threshold)
    for criterion in criteria:
        if criterion.mode.needs == "step_kl" and step_kl is None:
            raise BatchError(
                f"rollout_rs={criterion.name!r} needs step_kl; compute it from the rollout's step means"
            )
    veto = parse_veto(rollout_token_veto_threshold)
    scale = scale_factor(log_ratio_scale, num_elements)
    num_steps = _schedule_length(step_indices, num_steps)

    # The drift: all log-ratios in float64, and 0 at masked terms, so that no later exp, sum or maximum sees them.
    ratios = log_ratios(target_log_prob, rollout_log_prob, mask, step_kl, scale=scale)
    stats = describe.of_drift(ratios)
    if step_kl is not None and num_elements is not None:
        stats |= describe.of_bookkeeping(ratios, num_elements)

    # Importance weights: the expectation under the target policy is the rollout's expectation of `weight * loss`. The
    # cap trades the variance of large weights for a bias.
    weights = None
    if rollout_is is not None:
        raw = raw_weights(rollout_is, ratios)
        weights = capped(raw, cap)
        stats |= describe.of_weights(ratios, raw, weights, band_of(cap))

    # Rejection: a term is dropped, and the loss divided by what remains. A weight of a whole trajectory, or a criterion
    # on one, is unknown if one of its steps is not finite, so the whole sample goes.
    keep = ratios.valid
    weighs_samples = rollout_is in ("sequence", "geometric") and rollout_is_apply
    if weighs_samples or any(criterion.mode.level == "sample" for criterion in criteria):
        keep = keep & ~(ratios.on & ~ratios.valid).any(1, keepdim=True)
    if noise is not None:
        if step_indices is None:
            raise BatchError("noise is that of the steps of a schedule; give step_indices as well")
        slack = torch.zeros_like(ratios.delta) if slack is None else slack
        units = Units(step_indices=step_indices, num_steps=num_steps, scale=scale, num_elements=num_elements)
        ratios, criteria = _judged(ratios, criteria, noise, slack, units)
    elif any(criterion.needs_batch for criterion in criteria):
        floor = ratios.floor(num_elements)
        ratios, criteria = _measured(ratios, criteria, floor, scale, step_indices, num_steps, group)
    for criterion in criteria:
        # A user's mode may divide by zero at masked terms; a NaN would fail both comparisons and count as rejected.
        value = torch.where(_judged_terms(criterion, ratios).where, _value(criterion, ratios), 0.0)
        inside = (value >= criterion.lower) & (value <= criterion.upper)
        rejected = ratios.valid & ~(inside if criterion.mode.level == "step" else inside[:, None])
        keep = keep & ~rejected
        stats |= describe.of_rejection(ratios, criterion, value, rejected)
    if veto is not None:
        catastrophic = ratios.valid & (ratios.scaled < math.log(veto))
        keep = keep & ~catastrophic.any(1, keepdim=True)
        stats |= describe.of_veto(ratios, catastrophic)
    stats |= describe.of_outcome(ratios, keep)
    if step_indices is not None:
        stats |= describe.by_step(ratios, keep, weights, step_indices, num_steps)

    metrics = {f"rollout_corr/{name}": stat for name, stat in stats.items()}
    if weights is not None and rollout_is_batch_normalize:
        mean_weight = stats["rollout_is_mean" if rollout_is == "token" else "rollout_is_seq_mean"]
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean_weight
        # Self-normalised weights have the mean 1: they re-weigh terms and leave the size of the loss as it was.
        weights = weights / batch_mean(mean_weight, group)
    applied = weights.float() if weights is not None and rollout_is_apply else None
    return Correction(weights=applied, keep=keep, metrics=Metrics(metrics))


def _schedule_length(step_indices: Tensor | None, num_steps: int | None) -> int:
    """`num_steps`, or one more than the largest index; raises `BatchError` if an index is outside the schedule."""
    if step_indices is None:
        return num_steps or 0
    if step_indices.is_floating_point() or step_indices.dtype == torch.bool:
        raise BatchError(f"step_indices has dtype {step_indices.dtype}; it must be of integers")
    if not step_indices.numel() or (num_steps is not None and step_indices.device.type != "cpu"):
        return num_steps or 0
    first, last = torch.stack(torch.aminmax(step_indices)).tolist()
    length = last + 1 if num_steps is None else num_steps
    if first < 0 or last >= length:
        raise BatchError(
            f"step_indices reaches from {first} to {last}, and the schedule has num_steps={length}; give places from 0 "
            "on, and the length of the whole schedule"
        )
    return length


def _check_shapes(target: Tensor, tensors: Mapping[str, Tensor | None], *, may_be_empty: bool) -> None:
    check_tensor("target_log_prob", target, "[B, T]")
    shape = tuple(target.shape)
    if len(shape) != 2 or 0 in (shape[1:] if may_be_empty else shape):
        raise BatchError(f"target_log_prob has shape {list(shape)}; it must be [B, T] with at least one term")
    for name, tensor in tensors.items():
        if tensor is not None:
            check_shape(name, tensor, shape)


def _judged(
    ratios: LogRatios,
    criteria: Sequence[Criterion],
    noise: Mapping[str, Noise],
    slack: Tensor,
    units: Units,
) -> tuple[LogRatios, tuple[Criterion, ...]]:
    """Z-scores and `auto` bounds by the noise of earlier training steps."""
    bounded = []
    for criterion in criteria:
        if criterion.needs_batch:
            ratios, criterion = judged_by(noise.get(criterion.name), criterion, ratios, slack, units)
        bounded.append(criterion)
    return ratios, tuple(bounded)


def _measured(
    ratios: LogRatios,
    criteria: Sequence[Criterion],
    floor: Tensor,
    scale: float,
    step_indices: Tensor | None,
    num_steps: int,
    group: Group,
) -> tuple[LogRatios, tuple[Criterion, ...]]:
    """Z-scores and `auto` bounds, measured on the batch of all ranks; `floor` `[B, T]` is the size of rounding."""
    samples, steps = ratios.delta.shape
    if step_indices is None:
        step_indices, num_steps = torch.arange(steps, device=ratios.delta.device).repeat(samples, 1), steps
    num_rows = max(gather(num_steps, "the steps of a batch", group))
    if any(criterion.mode.needs == "z" for criterion in criteria):
        z = robust_z(ratios.delta, ratios.valid, step_indices, num_rows, floor=floor, group=group)
        ratios = replace(ratios, z=z)
    largest = gather_rows(torch.where(ratios.valid, floor, 0.0), "the resolution of log-probs", group).amax()
    rounding = one_sample(largest, steps, scale)

    def measured(criterion: Criterion) -> Criterion:
        lower, upper = measured_bounds(
            criterion.mode,
            _value(criterion, ratios),
            ratios.valid,
            rows=step_indices,
            num_rows=num_rows,
            floor=criterion.mode.value(rounding).abs().amax(),
            group=group,
        )
        return replace(criterion, lower=lower, upper=upper)

    return ratios, tuple(measured(criterion) if criterion.auto else criterion for criterion in criteria)


def _judged_terms(criterion: Criterion, ratios: LogRatios) -> Over:
    """The steps or the samples that a criterion judges."""
    return ratios.terms if criterion.mode.level == "step" else ratios.samples


def _value(criterion: Criterion, ratios: LogRatios) -> Tensor:
    """The value of a criterion's mode, `[B, T]` of steps or `[B]` of samples.

    Raises:
        ConfigError: a mode of the user's own returned another shape.
    """
    where, value = _judged_terms(criterion, ratios).where, criterion.mode.value(ratios)
    if isinstance(value, Tensor) and value.shape == where.shape:
        return value
    shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise ConfigError(
        f"{SECTION}.rollout_rs={criterion.name!r}: its value is {shape} for {len(ratios.delta)} samples of "
        f"{ratios.delta.shape[1]} steps; a mode of level {criterion.mode.level} returns a tensor {list(where.shape)}"
    )
