"""One correction on some dumped training steps, by the functions that training calls."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flowcorr import dumps
from flowcorr.algorithm import (
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    diffusion_loss,
)
from flowcorr.algorithm.apply import correct
from flowcorr.config import Config
from flowcorr.config.rules import check
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.bounds import scale_factor
from flowcorr.diagnostics.dumped import UNBOUNDED, completed
from flowcorr.dumps import DumpedTerms, LoggedTerms
from flowcorr.errors import ConfigError
from flowcorr.losses import loss_of
from flowcorr.metrics import Metrics
from flowcorr.records import ActorBatch, BatchStep, PolicyStep, Rollout

# Terms at a time: many small steps share the cost of a call, and what a call works on stays small.
CHUNK_TERMS = 2**18


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedSteps:
    """Some training steps in one mode.

    Attributes:
        terms: of all of them, `S` samples in the order of the steps; no two steps share a group.
        sizes: samples of each step.
        owners: `[S]`, which of the steps a sample belongs to.
    """

    terms: LoggedTerms
    sizes: tuple[int, ...]
    owners: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """Sums of `[S, T]` values over the terms of each step, float64."""
        zeros = torch.zeros(len(self.sizes), dtype=torch.float64)
        return zeros.index_add_(0, self.owners, values.double().sum(1))

    def rows(self) -> Iterator[slice]:
        """Where each step's samples are."""
        end = 0
        for size in self.sizes:
            yield slice(end, end + size)
            end += size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """Some steps under one correction.

    Attributes:
        coefficients: `[S, T]` float64, `d loss / d log_prob` of each step's mean loss.
        keep: `[S, T]` bool.
        metrics: `rollout_corr/*` and `actor/*`, as in training.
        loss_sum, count: of the loss, over all steps.
    """

    coefficients: Tensor
    keep: Tensor
    metrics: Metrics
    loss_sum: float
    count: float


def chunks(paths: Sequence[Path]) -> Iterator[LoggedSteps]:
    """Dumped steps in order, as many in one mode at a time as make about `CHUNK_TERMS` terms."""
    parts: list[DumpedTerms] = []
    for path in paths:
        part = dumps.load(path)
        full = sum(earlier.old_log_probs.numel() for earlier in parts) >= CHUNK_TERMS
        if parts and (full or _kind(part) != _kind(parts[0])):
            yield stack(parts)
            parts = []
        parts.append(part)
    if parts:
        yield stack(parts)


def stack(parts: Sequence[DumpedTerms]) -> LoggedSteps:
    """Steps of one mode, with the same optional tensors."""
    sizes = tuple(len(part.advantages) for part in parts)
    owners = torch.arange(len(parts)).repeat_interleave(torch.tensor(sizes))
    terms = completed(DumpedTerms.concatenate(parts))
    groups = terms.group_ids.unique(return_inverse=True)[1]  # ids of any size, counted from 0 on
    return LoggedSteps(
        terms=replace(terms, group_ids=groups + len(groups) * owners), sizes=sizes, owners=owners
    )


def _kind(terms: DumpedTerms) -> tuple[bool, int | None, frozenset[str]]:
    return terms.bypass, terms.num_elements, frozenset(terms.tensors())


def obstacle(terms: LoggedTerms, config: Config, correction: RolloutCorrectionConfig) -> str:
    """Why these terms cannot be replayed under a correction; empty if they can."""
    if terms.bypass and correction.mode == "decoupled":
        return "in bypass mode, old log-probs are the rollout's; dump a run with bypass_mode=false"
    corrected = replace(config, algorithm=replace(config.algorithm, rollout_correction=correction))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of keys that this correction does not read
            check(corrected)
    except ConfigError as error:
        return str(error)
    clips = correction.mode == "bypass" and correction.loss_type == "ppo_clip"
    if config.actor.clip_ratio == UNBOUNDED and clips and not terms.bypass:
        return "it clips the ratio to the rollout policy, and clip_ratio was not dumped"
    if terms.num_elements is None and _needs_size(correction):
        return "it needs num_elements, which was not dumped"
    of_correction, of_loss = _kls(terms, correction)
    reads_means = loss_of(config.actor, correction).needs_means
    if (correction.needs_means and of_correction is None) or (reads_means and of_loss is None):
        return "it needs exact KLs between policies whose step means the run did not compute"
    return ""


def _needs_size(correction: RolloutCorrectionConfig) -> bool:
    robust = any(criterion.mode.needs == "z" or criterion.auto for criterion in correction.criteria)
    return robust or correction.log_ratio_scale in ("sqrt", "sum")


def replay(steps: LoggedSteps, config: Config, correction: RolloutCorrectionConfig | None) -> Replayed:
    """Correct the steps and differentiate their loss, without a KL to the reference."""
    terms, num_steps = steps.terms, config.sampling.num_inference_steps
    if correction is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a scale that has nothing to act on
            # As a number, since the loss would read `D` off the stand-ins of its means.
            scale = scale_factor(correction.log_ratio_scale, terms.num_elements)
            correction = replace(correction, log_ratio_scale=scale)
    batch, metrics = _batch(terms), Metrics()
    keep = torch.ones_like(terms.sigmas, dtype=torch.bool)
    if correction is not None and correction.mode == "bypass":
        batch = apply_bypass_mode_to_diffusion_batch(batch)
        keep = _kept_in_bypass(terms, correction)
    elif correction is not None:
        batch, metrics = _decoupled(steps, batch, correction, num_steps)
        assert batch.keep is not None
        keep = batch.keep
    _, kl = _kls(terms, correction)
    batch = replace(batch, old_means=None if kl is None else _origins(kl))
    log_prob = terms.current_log_probs.clone().requires_grad_()
    policy = PolicyStep(
        log_prob=log_prob,
        mean=terms.sigmas.new_full((*keep.shape, 1), math.nan) if kl is None else _stand_ins(kl, terms.stds),
        std=terms.stds,
        step=terms.sigmas - terms.sigmas_next,
    )
    step = BatchStep.of(batch)
    if config.actor.ratio_level == "step" and not _sees_trajectories(correction):
        policy, step = policy.per_term(), step.per_term()
    loss = diffusion_loss(policy, step, config.actor, correction, num_steps=num_steps)
    loss.loss_sum.backward()
    assert log_prob.grad is not None
    assert batch.old_log_probs is not None
    finite = (terms.current_log_probs - batch.old_log_probs + batch.advantages[:, None]).isfinite()
    over_all = correction is not None and correction.rollout_rs_denominator == "all"
    counts = steps.sums(finite if over_all else finite & keep).clamp(min=1)
    return Replayed(
        coefficients=log_prob.grad.double() / counts[steps.owners].unsqueeze(1),
        keep=keep,
        metrics=Metrics.merged((loss.metrics, loss.correction_metrics, metrics)),
        loss_sum=float(loss.loss_sum.detach()),
        count=float(loss.count_all if over_all else loss.count_kept),
    )


def _decoupled(
    steps: LoggedSteps, batch: ActorBatch, correction: RolloutCorrectionConfig, num_steps: int
) -> tuple[ActorBatch, Metrics]:
    """Correct all steps at once, or one by one where the correction looks at a step as a whole."""
    whole = correction.rollout_is_batch_normalize or any(
        criterion.needs_batch for criterion in correction.criteria
    )
    parts = [
        apply_rollout_correction_to_diffusion_batch(batch.select(rows), correction, num_steps=num_steps)
        for rows in (steps.rows() if whole else [slice(None)])
    ]
    weights = [part.rollout_is_weights for part, _ in parts if part.rollout_is_weights is not None]
    corrected = replace(
        batch,
        advantages=torch.cat([part.advantages for part, _ in parts]),
        rollout_is_weights=torch.cat(weights) if weights else None,
        keep=torch.cat([part.keep for part, _ in parts if part.keep is not None]),
    )
    return corrected, Metrics.merged(metrics for _, metrics in parts)


def _kept_in_bypass(terms: LoggedTerms, correction: RolloutCorrectionConfig) -> Tensor:
    """`[S, T]` bool, what the loss keeps, which it does not tell."""
    # In scope step, every term is a trajectory of its own.
    shape = terms.sigmas.shape if _sees_trajectories(correction) else (-1, 1)
    kl = terms.current_rollout_kl
    means = None if kl is None else _stand_ins(kl, terms.stds).reshape(*shape, 1)
    return correct(
        terms.current_log_probs.reshape(shape),
        terms.rollout_log_probs.reshape(shape),
        correction,
        mask=None,
        step_index=terms.step_indices.reshape(shape),
        target_mean=means,
        rollout_mean=None if means is None else torch.zeros_like(means),
        std=terms.stds.reshape(shape),
        num_elements=terms.num_elements,
        num_steps=int(terms.step_indices.max()) + 1,
    ).keep.view(terms.sigmas.shape)


def _batch(terms: LoggedTerms) -> ActorBatch:
    """The batch as training corrects it, with latents that have a size only."""
    kl = terms.old_rollout_kl
    rollout_kl = kl if terms.current_rollout_kl is None else terms.current_rollout_kl
    latents = terms.sigmas.new_zeros(()).expand(*terms.sigmas.shape, terms.num_elements or 1)
    rollout = Rollout(
        latents=latents,
        next_latents=latents,
        step_indices=terms.step_indices,
        timesteps=terms.timesteps,
        sigmas=terms.sigmas,
        sigmas_next=terms.sigmas_next,
        log_probs=terms.rollout_log_probs,
        group_ids=terms.group_ids,
        policy_versions=terms.policy_versions,
        means=None if rollout_kl is None else _origins(rollout_kl),
        stds=terms.stds,
    )
    return ActorBatch(
        rollout=rollout,
        advantages=terms.advantages,
        old_log_probs=terms.old_log_probs,
        old_means=None if kl is None else _stand_ins(kl, terms.stds),
    )


def _kls(
    terms: LoggedTerms, correction: RolloutCorrectionConfig | None
) -> tuple[Tensor | None, Tensor | None]:
    """The exact KLs `[S, T]` that the correction and the loss look at, where they are known."""
    if correction is not None and correction.mode == "bypass":
        return terms.current_rollout_kl, terms.current_rollout_kl
    return terms.old_rollout_kl, terms.current_old_kl


def _stand_ins(kl: Tensor, stds: Tensor) -> Tensor:
    """`[S, T, 1]` step means of one element, as far from `_origins` as the exact `kl` says."""
    return ((2 * kl).sqrt() * stds).unsqueeze(-1)


def _origins(kl: Tensor) -> Tensor:
    return torch.zeros_like(kl).unsqueeze(-1)


def _sees_trajectories(correction: RolloutCorrectionConfig | None) -> bool:
    return correction is not None and correction.mode == "bypass" and correction.bypass_scope == "trajectory"
