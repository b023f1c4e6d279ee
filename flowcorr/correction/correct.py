"""One entry for both modes: importance weights, a rejection mask and all diagnostics of a drift."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from flowcorr.correction import diagnostics
from flowcorr.correction.bounds import (
    IS_LEVELS,
    SECTION,
    Band,
    Criterion,
    parse_band,
    parse_criteria,
    parse_veto,
)
from flowcorr.correction.columns import Columns
from flowcorr.correction.ratios import (
    LogRatios,
    Scaled,
    below,
    bounded_expm1,
    log_ratios,
    on_steps,
    scale_factor,
    scaled_ratios,
    sum_steps,
)
from flowcorr.correction.rejection import judge, log_prob_resolution, measured_bounds
from flowcorr.correction.robust import robust_z
from flowcorr.correction.weights import Weights, batch_mean, importance_weights
from flowcorr.distributed import Group, gather, world_size
from flowcorr.errors import BatchError, ConfigError, unknown_choice
from flowcorr.metrics import Block, Metrics, Stat, maximum, minimum

# Terms at a time: a CPU then works on the same few megabytes again and again.
_CHUNK_TERMS = 163840


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """What a correction does to a batch.

    Attributes:
        weights: `[B, T]` float32, detached, 0 where the mask is off or a value is not finite; None where weights
            are off or not applied.
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
    clip_ratio: float | Tensor | None = None,
    log_legacy_names: bool = False,
    group: Group = None,
) -> Correction:
    """Weigh and reject terms by the drift from the rollout policy to a target policy, and describe the drift.

    With `delta = target - rollout` in nats per latent element, weights, bands and veto act on
    `log_ratio_scale * delta`; `exp` of it is a density ratio only for scale `sum`. Rejection never changes
    weights, and nothing here carries a gradient. A non-finite step rejects its step, or its sample where weights
    or a rejection mode are of samples.

    Args:
        target_log_prob: `[B, T]`, under the old policy (decoupled mode) or the current one (bypass mode).
        rollout_log_prob: `[B, T]`, under the policy that sampled.
        mask: `[B, T]`, nonzero where a term counts; None for everywhere.
        rollout_is: `token` (`exp(delta)`), `sequence` (`exp(sum_t delta)`), `geometric` (`exp(mean_t delta)`),
            or None. Exponents are held within +-20.
        rollout_is_threshold: a number caps weights, a pair zeroes those outside, `inf` leaves them.
        rollout_is_apply: False computes weights for the metrics only.
        rollout_is_batch_normalize: divide by the mean weight over all terms (`token`) or samples, of all ranks.
        rollout_rs: a rejection mode, or several chained by commas; see `bounds.RS_MODES`.
        rollout_rs_threshold: its threshold, or theirs; see `bounds.parse_criteria`. `auto` is measured on this
            batch, over all ranks, and logged as `rollout_rs_<mode>_threshold_low` and `_high`.
        rollout_token_veto_threshold: a step with a ratio below it rejects its sample.
        log_ratio_scale: `mean`, `sqrt`, `sum` or a number; `sqrt` and `sum` need `num_elements`.
        step_kl: `[B, T]`, exact KL of each step a latent element, for `step_kl`, `seq_kl` (the sum over a
            sample's steps: the KL of its window, by the chain rule) and the bookkeeping check.
        step_indices: `[B, T]`, places in the schedule; adds a row of metrics for each.
        num_elements: `D`, latent elements of a sample.
        num_steps: length of the schedule; without it, `step_indices` cost a host read. Metrics of calls with it do
            not merge with those of calls without.
        clip_ratio: the loss's clip range, one number or one a term, for `clip_noise_fraction`.
        log_legacy_names: add the `mismatch/*` names.
        group: ranks that share the batch; one of several may have no samples.

    Raises:
        ConfigError: a choice or threshold is bad.
        BatchError: shapes differ (nothing is broadcast), or a tensor that a choice needs is missing.
    """
    batch = _Batch(
        target_log_prob=target_log_prob,
        rollout_log_prob=rollout_log_prob,
        mask=mask,
        step_kl=step_kl,
        step_indices=step_indices,
        clip_ratio=clip_ratio,
    )
    batch.validate(may_be_empty=world_size(group) > 1)
    samples = len(target_log_prob)
    if not samples:
        batch = batch.one_masked_sample()  # which counts nowhere, and keeps this rank in step with the others
    num_rows = num_steps or 0
    if num_steps is None and batch.step_indices is not None:
        num_rows = int(batch.step_indices.max()) + 1
    plan = _Plan(
        level=_parse_level(rollout_is),
        cap=_parse_cap(rollout_is, rollout_is_threshold),
        apply=rollout_is_apply,
        normalize=rollout_is_batch_normalize,
        criteria=parse_criteria(rollout_rs, rollout_rs_threshold),
        veto=parse_veto(rollout_token_veto_threshold),
        scale=scale_factor(log_ratio_scale, num_elements),
        num_elements=num_elements,
        num_rows=num_rows,
        legacy_names=log_legacy_names,
    )
    if any(criterion.needs_batch for criterion in plan.criteria):
        batch, plan = _measured(batch, plan, group)

    part = _join([_correct(rows, plan) for rows in batch.chunks()])
    weights, names, over = part.weights, part.columns.names(), plan.normalize_over
    if weights is not None and over is not None:
        sums, slots = part.block.sums, names.sum_slots()
        weights /= batch_mean(sums[slots[f"weight/{over}"]], sums[slots[f"n/{over}"]], group)
    metrics = diagnostics.metrics(part.block, names, plan.criteria, over, plan.legacy_names, num_steps)
    return Correction(
        weights=None if weights is None else weights[:samples],
        keep=part.keep[:samples],
        metrics=metrics.merge(_threshold_metrics(plan)),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """The choices of one call, parsed.

    `num_rows` is above every step index of this rank's batch, and `measured` holds the bounds that the batch of all
    ranks gave, by mode.
    """

    level: str | None
    cap: float | Band
    apply: bool
    normalize: bool
    criteria: tuple[Criterion, ...]
    veto: float | None
    scale: float
    num_elements: int | None
    num_rows: int
    legacy_names: bool
    measured: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def normalize_over(self) -> str | None:
        if self.level is None or not self.normalize:
            return None
        return "terms" if self.level == "token" else "samples"

    @property
    def needs_whole_samples(self) -> bool:
        """Whether one missing step spoils its sample: for its weight, or for a rejection mode."""
        by_weight = self.apply and self.level in ("sequence", "geometric")
        return by_weight or any(not criterion.per_step for criterion in self.criteria)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batch:
    """The tensors of one call, `[B, T]` each."""

    target_log_prob: Tensor
    rollout_log_prob: Tensor
    mask: Tensor | None = None
    step_kl: Tensor | None = None
    step_indices: Tensor | None = None
    clip_ratio: float | Tensor | None = None
    robust_z: Tensor | None = None

    def validate(self, *, may_be_empty: bool) -> None:
        shape = self.target_log_prob.shape
        if len(shape) != 2 or 0 in (shape[1:] if may_be_empty else shape):
            raise BatchError(
                f"target_log_prob has shape {list(shape)}; it must be [B, T] with at least one term"
            )
        for name, value in self._tensors().items():
            if value.shape != shape:
                raise BatchError(
                    f"{name} has shape {list(value.shape)} and target_log_prob {list(shape)}; "
                    f"they must be the same, nothing is broadcast"
                )

    def one_masked_sample(self) -> _Batch:
        """A batch of one sample that takes no part, in place of none."""
        terms = {name: value.new_zeros(1, value.shape[1]) for name, value in self._tensors().items()}
        return replace(self, **{**terms, "mask": torch.zeros_like(terms["target_log_prob"])})

    def chunks(self) -> Iterator[_Batch]:
        """The batch in runs of samples that fit a CPU's cache; whole on other devices."""
        samples, steps = self.target_log_prob.shape
        size = max(_CHUNK_TERMS // steps, 1)
        if samples <= size or self.target_log_prob.device.type != "cpu":
            yield self
            return
        for start in range(0, samples, size):
            yield replace(
                self, **{name: value[start : start + size] for name, value in self._tensors().items()}
            )

    def _tensors(self) -> dict[str, Tensor]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """The correction of one run of samples."""

    weights: Tensor | None
    keep: Tensor
    columns: Columns
    block: Block


def _measured(batch: _Batch, plan: _Plan, group: Group) -> tuple[_Batch, _Plan]:
    """Batch and plan with what only the whole batch tells: robust z of its terms, and bounds that are `auto`."""
    ratios = log_ratios(batch.target_log_prob, batch.rollout_log_prob, batch.mask, batch.step_kl)
    floor = log_prob_resolution(batch.target_log_prob, batch.rollout_log_prob)
    if plan.num_elements is not None:
        floor = floor.clamp(min=0.01 / plan.num_elements)
    rows, num_rows = batch.step_indices, max(gather(plan.num_rows, "the steps of a batch", group))
    if rows is None:
        samples, num_rows = ratios.delta.shape
        rows = torch.arange(num_rows, device=ratios.delta.device).repeat(samples, 1)
    if any(criterion.mode == "step_z" for criterion in plan.criteria):
        z = robust_z(ratios.delta, ratios.valid, rows, num_rows, floor=floor, group=group)
        batch = replace(batch, robust_z=z)
    automatic = [criterion for criterion in plan.criteria if criterion.auto]
    if not automatic:
        return batch, plan
    scaled = scaled_ratios(ratios, bounded_expm1(ratios.delta), plan.scale)
    floor = (floor * ratios.valid).amax()
    measured = {
        criterion.mode: measured_bounds(
            criterion, ratios, scaled, plan.scale, rows=rows, num_rows=num_rows, floor=floor, group=group
        )
        for criterion in automatic
    }
    return batch, replace(plan, measured=measured)


def _threshold_metrics(plan: _Plan) -> Metrics:
    """The bounds that were measured, as they would be written: of ratios for k1 modes."""
    stats: dict[str, Stat] = {}
    for criterion in plan.criteria:
        if criterion.auto:
            name = f"rollout_corr/rollout_rs_{criterion.mode}_threshold"
            low, high = plan.measured[criterion.mode]
            if criterion.bounds_ratio:
                low, high = low.exp(), high.exp()
                stats[f"{name}_low"] = minimum(low)
            stats[f"{name}_high"] = maximum(high)
    return Metrics.from_stats(stats)


def _correct(batch: _Batch, plan: _Plan) -> _Part:
    ratios = log_ratios(batch.target_log_prob, batch.rollout_log_prob, batch.mask, batch.step_kl)
    columns = Columns(ratios)
    excess = bounded_expm1(ratios.delta)
    scaled = scaled_ratios(ratios, excess, plan.scale)

    diagnostics.add_drift(columns, excess)
    if batch.step_kl is not None:
        resolution = log_prob_resolution(batch.target_log_prob, batch.rollout_log_prob)
        diagnostics.add_exact_kl(columns, plan.num_elements, resolution)
    if batch.clip_ratio is not None:
        diagnostics.add_clip(columns, batch.clip_ratio)

    weights = None
    if plan.level is not None:
        weights, seq_weights = importance_weights(plan.level, ratios, scaled, plan.cap)
        diagnostics.add_weights(columns, weights, seq_weights)

    keep = _keep(columns, batch, plan, scaled)
    if batch.step_indices is not None:
        diagnostics.add_steps(columns, batch.mask, keep, excess, weights)
    return _Part(
        weights=_weights_of_terms(weights, ratios) if plan.apply else None,
        keep=keep,
        columns=columns,
        block=columns.pack(batch.step_indices, plan.num_rows),
    )


def _join(parts: list[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]
    weights = [part.weights for part in parts if part.weights is not None]
    return _Part(
        weights=torch.cat(weights) if weights else None,
        keep=torch.cat([part.keep for part in parts]),
        columns=parts[0].columns,
        block=Block(
            torch.stack([part.block.sums for part in parts]).sum(0),
            torch.stack([part.block.maxima for part in parts]).amax(0),
        ),
    )


def _keep(columns: Columns, batch: _Batch, plan: _Plan, scaled: Scaled) -> Tensor:
    """`[B, T]` bool, the terms that every criterion and the veto let pass."""
    ratios = columns.ratios
    kept, num_kept = ratios.valid, ratios.num_valid
    spoilt = torch.zeros_like(ratios.num_valid)
    if plan.needs_whole_samples:
        spoilt = (ratios.num_masked_on - ratios.num_valid).clamp_(max=1.0)
    for criterion in plan.criteria:
        bounds = plan.measured.get(criterion.mode, (criterion.lower, criterion.upper))
        verdict = judge(criterion, bounds, ratios, scaled, batch.robust_z)
        diagnostics.add_verdict(columns, criterion.mode, verdict)
        if criterion.per_step:
            kept = kept * (1.0 - verdict.out)
            num_kept = sum_steps(kept)
        else:
            spoilt = torch.maximum(spoilt, verdict.out)
    if plan.veto is not None:
        catastrophic = below(scaled.values, math.log(plan.veto)).mul_(ratios.valid)
        spoilt = torch.maximum(spoilt, diagnostics.add_veto(columns, catastrophic))
    diagnostics.add_outcome(columns, num_kept * (1.0 - spoilt))
    keep = on_steps(spoilt == 0.0, kept)
    return keep if kept is ratios.valid and ratios.all_valid else keep.logical_and_(kept.bool())


def _weights_of_terms(weights: Weights | None, ratios: LogRatios) -> Tensor | None:
    """`[B, T]` float32 weights, 0 where invalid."""
    if weights is None:
        return None
    weight = (weights.excess + 1.0).float()
    weight = weight if weight.dim() == 2 else on_steps(weight, ratios.delta)
    return weight if ratios.all_valid else weight.mul_(ratios.valid.float())


def _parse_level(rollout_is: str | None) -> str | None:
    if rollout_is is not None and rollout_is not in IS_LEVELS:
        raise ConfigError(unknown_choice(f"{SECTION}.rollout_is", rollout_is, IS_LEVELS))
    return rollout_is


def _parse_cap(rollout_is: str | None, threshold: object) -> float | Band:
    if rollout_is is None:
        return math.inf
    if threshold is None:
        raise ConfigError(
            f"{SECTION}.rollout_is_threshold is null while rollout_is={rollout_is!r}; "
            f"write inf for weights without a cap, or set rollout_is: null"
        )
    return parse_band(threshold, "rollout_is_threshold")
