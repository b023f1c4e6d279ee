"""Learning: optimizer steps on the policy loss of a batch."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from flowcorr import distributed, sde
from flowcorr.actor.adamw import OPTIMIZERS, scheduled_lr
from flowcorr.actor.loss_scale import LossScale
from flowcorr.actor.pass_bound import bound_passes
from flowcorr.actor.scoring import Observe, Scorer
from flowcorr.actor.weights import TrainedWeights
from flowcorr.algorithm import diffusion_loss
from flowcorr.algorithm.apply import sees_windows
from flowcorr.algorithm.bands import MOST_REJECTED, MeasuredBands
from flowcorr.algorithm.by_worker import by_worker
from flowcorr.algorithm.score_drift import ScoreDrift, score_drift
from flowcorr.algorithm.terms import batch_terms
from flowcorr.config.schema import Config
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.distributed import fsdp
from flowcorr.losses import loss_of
from flowcorr.metrics import Metrics, Stat, mean, total
from flowcorr.records import ActorBatch, LossOutput, Rollout, Terms

logger = logging.getLogger(__name__)

BatchT = TypeVar("BatchT", ActorBatch, Rollout)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A part of a mini-batch, with its loss.

    Attributes:
        loss: its loss, without a graph.
        terms: the terms of the loss, as they were before a correction inside it; None if the part was not scored.
        places: index of each term in the flattened `[B, T]` of the batch.
        before: whether it was scored before the first optimizer step.
    """

    loss: LossOutput
    terms: Terms | None = None
    places: Tensor | None = None
    before: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """Metrics of an update, and the parts that it was computed in.

    Attributes:
        metrics: `actor/*` over the whole update. In bypass mode also `actor/rollout_corr/*` over the whole update, and
            `rollout_corr/*` over `first_terms`.
        parts: in the order in which they were scored.
        first_terms: the terms that were scored before the first optimizer step, each once.
    """

    metrics: Metrics
    parts: Sequence[Part]
    first_terms: Sequence[Terms]


class PolicyOptimizer:
    """AdamW on the policy loss.

    Args:
        weights: the trained weights.
        scorer: scores under them.
        config: the run's configuration.
    """

    def __init__(self, weights: TrainedWeights, scorer: Scorer, config: Config) -> None:
        self.weights, self.scorer, self.config = weights, scorer, config
        actor = config.actor
        self.adamw = OPTIMIZERS[actor.optimizer](weights.parameters, actor)
        self.loss_scale = LossScale(scales=config.model.dtype == "float16")
        self.bands = MeasuredBands(
            actor,
            num_steps=config.sampling.num_inference_steps,
            window_size=config.sampling.sde_window_size,
            device=weights.device,
        )

    @torch.enable_grad()  # a reward or metric of one's own may have turned gradients off for this thread
    def update(
        self,
        batch: ActorBatch,
        correction: RolloutCorrectionConfig,
        *,
        training_step: int,
        observe: Observe | None = None,
    ) -> Update:
        """Take `epochs * mini_batches` optimizer steps on a batch that has `old_log_probs`.

        Passes are as large as the memory allows.

        Args:
            batch: the samples.
            correction: the rollout correction in force; in bypass mode it acts inside the loss.
            training_step: seeds the order of the mini-batches.
            observe: called with the parts of the first epoch that are scored before the first optimizer step; see
                `Observe`.
        """
        bound_passes(self.scorer, batch.rollout)
        batch, filler_sample = batch.numbered(), batch.rollout.select(slice(1))
        first_version = self.weights.version
        metrics: list[Metrics] = []
        scored: list[Part] = []
        first_parts: list[Part] = []
        for epoch in range(self.config.actor.epochs):
            for mini_batch in self.mini_batches(batch, training_step, epoch):
                before = self.weights.version == first_version
                # Of the first epoch alone: if all of its updates are skipped, the next one scores the same terms.
                first = before and epoch == 0
                parts = self._backward(mini_batch, correction, filler_sample, observe, first)
                scored += [replace(part, before=before) for part in parts]
                first_parts += parts if first else []
                gradient = self._clipped_gradient(parts)
                metrics += [_loss_metrics(mini_batch, parts), self._step(gradient, correction)]
        first_terms = [part.terms for part in first_parts if part.terms is not None]
        gap = self._gap_metrics(first_parts, correction, batch.rollout.num_elements)
        steps = self.config.sampling.num_inference_steps
        drifts = [score_drift(terms, steps) for terms in first_terms]
        return Update(metrics=Metrics(*metrics, gap, *drifts), parts=scored, first_terms=first_terms)

    def mini_batches(self, batch: ActorBatch, training_step: int, epoch: int) -> Iterator[ActorBatch]:
        """The batch in `mini_batches` parts of whole groups, which do not depend on the number of ranks."""
        config = self.config
        parts = config.actor.mini_batches
        dealt = deal_groups(
            batch.rollout.group_ids, parts, seed=config.trainer.seed, training_step=training_step, epoch=epoch
        )
        for part in range(parts):
            yield batch.select((dealt == part).nonzero().squeeze(1))

    def _backward(
        self,
        batch: ActorBatch,
        correction: RolloutCorrectionConfig,
        filler_sample: Rollout,
        observe: Observe | None,
        first: bool,
    ) -> list[Part]:
        """Accumulate the gradient of a mini-batch's loss sum; a rank without samples adds zeros.

        Samples without a gradient are only counted, or scored without a graph if something reads their scores: the
        correction inside the loss in bypass mode, or the file of `trainer.dump_log_probs`.

        A sample with a forward pass that is not finite is dropped with all its steps. If each step has its own backward
        pass, earlier steps of the sample are in the gradient by then, so the mini-batch is run again without it.
        """
        is_read = self.config.trainer.dump_log_probs or correction.mode == "bypass"
        has_gradient = self._has_gradient(batch.advantages, correction, is_read)
        learned, rest = (where.nonzero().squeeze(1) for where in (has_gradient, ~has_gradient))
        num_fillers = self.scorer.num_fillers(len(self.scorer.micro_batches(len(learned))), filler_sample)
        whole_windows = sees_windows(self.config.actor, correction)
        # Sharded weights allow no pass that other ranks do not make.
        one_unit = whole_windows or self.scorer.passes.folded or self.weights.sharded
        dropped = torch.zeros_like(batch.advantages, dtype=torch.bool)
        observe = observe if first else None
        while True:
            self.adamw.zero_grad()
            drift = ScoreDrift.of(batch) if first and correction.mode != "off" else None
            parts, finite = self._losses(batch, learned, dropped, correction, observe, drift)
            if is_read:
                with torch.no_grad():
                    more, also = self._losses(batch, rest, dropped, correction, observe, drift)
                parts, finite = parts + more, finite & also
            if one_unit or (finite | dropped).all():
                break
            dropped, observe = dropped | ~finite, None
        if drift is not None:
            parts = _with_squares(parts, drift)
        if not is_read:
            parts.append(Part(loss=_counted(batch, rest)))
        for _ in range(num_fillers):
            # A rank with fewer micro-batches joins the collectives of the others' passes, with a gradient of 0.
            for rollout in self._backward_units(filler_sample, whole_windows):
                self.scorer.reference_means(rollout)
                (0.0 * self.scorer.score(rollout).log_probs.sum()).backward()
        return parts

    def _has_gradient(self, advantages: Tensor, correction: RolloutCorrectionConfig, is_read: bool) -> Tensor:
        """Bool `[B]`, samples that may have a gradient; the gradient of the others is 0 for any scores."""
        scaled = loss_of(self.config.actor, correction).scaled_by_advantage and not self.config.actor.kl_coef
        # With sharded weights all ranks need equally many forward passes, with a graph or without one.
        if not scaled or (is_read and self.weights.sharded):
            return torch.ones_like(advantages, dtype=torch.bool)
        return advantages != 0

    def _losses(
        self,
        batch: ActorBatch,
        samples: Tensor,
        dropped: Tensor,
        correction: RolloutCorrectionConfig,
        observe: Observe | None,
        drift: ScoreDrift | None,
    ) -> tuple[list[Part], Tensor]:
        """The loss of each micro-batch of the batch's `samples` `[b]`; its gradient is added to the others.

        Args:
            batch: the mini-batch.
            samples: places in the batch.
            dropped: `[B]` bool, samples that are left out, because a forward pass of theirs was not finite.
            correction, observe: as in `update`.
            drift: gets the terms, or None where their drift is not measured.

        Returns:
            The parts; and bool `[B]`, False for samples of the batch with a forward pass that is not finite.
        """
        whole_windows = sees_windows(self.config.actor, correction)
        parts, finite = [], torch.ones_like(dropped)
        for rows in self.scorer.micro_batches(len(samples)):
            places = samples[rows]
            for unit in self._backward_units(batch.select(places), whole_windows):
                # The reference's pass comes first, while the policy's graph does not yet take memory.
                reference_means = self.scorer.reference_means(unit.rollout)
                scores = self.scorer.score_finite(unit.rollout, dropped[places])
                finite[places] &= scores.log_probs.detach().isfinite().all(1)
                if observe is not None:
                    observe(unit.rollout, scores)
                terms = batch_terms(unit, scores, reference_means, centres=correction.score_centering)
                terms = terms if whole_windows else terms.per_term()
                loss = diffusion_loss(
                    terms,
                    self.config.actor,
                    correction,
                    num_steps=self.config.sampling.num_inference_steps,
                    noise=self.bands.noise,
                    cps_unscaled=self.config.sampling.cps_unscaled,
                )
                if self.weights.sharded or loss.loss_sum.requires_grad:
                    (self.loss_scale.value * loss.loss_sum).backward()
                loss = replace(loss, loss_sum=loss.loss_sum.detach())
                if drift is not None:
                    drift.add_scored(unit, scores, loss.keep)
                parts.append(Part(loss=loss, terms=terms.detach(), places=unit.places))
        return parts, finite

    def _backward_units(self, batch: BatchT, whole_windows: bool) -> list[BatchT]:
        """The parts of a micro-batch that each get a backward pass: its windows, or each of their steps."""
        if whole_windows or self.scorer.passes.folded:
            return [batch]
        return [batch.step(t) for t in range(self.config.sampling.sde_window_size)]

    def _clipped_gradient(self, parts: Sequence[Part]) -> Gradient:
        """Divide the accumulated gradient by the count of all ranks, and clip it."""
        zero = torch.zeros((), device=self.weights.device)
        loss_sum = sum((part.loss.loss_sum for part in parts), zero)
        kept = sum((part.loss.count_kept for part in parts), zero).float()
        finite_terms = sum((part.loss.count_all for part in parts), zero).float()
        over_all = self.config.algorithm.rollout_correction.rollout_rs_denominator == "all"
        counted = finite_terms if over_all else kept
        counts = self._divide_gradients(counted, [kept, finite_terms])
        parameters = self.weights.parameters.values()
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.actor.grad_clip)
        # The one read by the host of an optimizer step.
        values = torch.stack([fsdp.full_tensor(norm).double(), *(count.double() for count in counts)])
        norm_on_host, num_kept, num_finite = values.tolist()
        return Gradient(
            norm=norm_on_host, num_kept=num_kept, num_finite=num_finite, loss=mean(loss_sum, counted)
        )

    def _step(self, gradient: Gradient, correction: RolloutCorrectionConfig) -> Metrics:
        """Take an optimizer step, unless something is wrong with the gradient, and describe it."""
        actor, finite = self.config.actor, math.isfinite(gradient.norm)
        measures = correction.mode == "bypass" and correction.needs_batch
        mostly_rejected = measures and gradient.num_rejected > MOST_REJECTED * gradient.num_finite
        fault = _fault(gradient, mostly_rejected)
        self.loss_scale.observe(finite=finite)
        last = self.config.trainer.total_steps * actor.epochs * actor.mini_batches
        learning_rate = scheduled_lr(actor, self.weights.version, last)
        if fault:
            logger.warning("%s; this update is skipped", fault)
        else:
            self.adamw.step(learning_rate)
            self.weights.version += 1
            self.weights.update_average()
        is_main = distributed.is_main()  # an update of all ranks is counted once
        stats = {
            "actor/loss": gradient.loss,
            "actor/lr": mean(learning_rate, 1),
            "actor/grad_norm": mean(gradient.norm if finite else 0.0, int(finite)),
            "actor/updates": total(int(not fault and is_main)),
            "actor/skipped_updates": total(int(bool(fault) and is_main)),
        }
        if measures:
            stats["actor/mostly_rejected_updates"] = total(int(mostly_rejected and is_main))
        return Metrics(stats)

    def _gap_metrics(
        self, parts: Sequence[Part], correction: RolloutCorrectionConfig, num_elements: int
    ) -> Metrics:
        """In bypass mode, `rollout_corr/*` of parts that were scored before the first optimizer step."""
        if correction.mode != "bypass":
            return Metrics()
        terms = [part.terms for part in parts if part.terms is not None]
        workers, steps = self.config.rollout.num_workers, self.config.sampling.num_inference_steps
        bands = self.bands.observe(correction, terms, num_elements)
        corrections = [part.loss.correction_metrics for part in parts]
        return Metrics(*corrections, by_worker(terms, workers, steps), bands)

    def _divide_gradients(self, counted: Tensor, counts: Sequence[Tensor]) -> list[Tensor]:
        """Turn each rank's gradient of its scaled loss sum into the gradient of the whole mini-batch's mean loss.

        Args:
            counted: 0-d, the terms of this rank that the mean is taken over.
            counts: other numbers of this rank, 0-d.

        Returns:
            `counts`, added up over all ranks.
        """
        for parameter in self.weights.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [
            fsdp.local_shard(parameter.grad)
            for parameter in self.weights.parameters.values()
            if parameter.grad is not None
        ]
        if self.weights.trains_shards:
            counted, *totals = sum_over_ranks([], [counted, *counts])
            torch._foreach_mul_(gradients, distributed.world_size())  # FSDP has averaged them over the ranks
        else:
            counted, *totals = sum_over_ranks(gradients, [counted, *counts])
        # One division by the terms of all ranks, and not a mean of the ranks' means: each term counts the same, on
        # whatever rank and in whatever micro-batch it was scored.
        torch._foreach_div_(gradients, self.loss_scale.value * counted.clamp(min=1))
        return totals


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradient:
    """Facts about the gradient of a mini-batch of all ranks; the gradient itself is in `parameter.grad`.

    Attributes:
        norm: before it was clipped.
        num_kept: terms that entered the loss.
        num_finite: terms that are finite, rejected or not.
        loss: the mean loss of this rank's terms.
    """

    norm: float
    num_kept: float
    num_finite: float
    loss: Stat

    @property
    def num_rejected(self) -> float:
        return self.num_finite - self.num_kept


def _fault(gradient: Gradient, mostly_rejected: bool) -> str:
    """The reason to skip an optimizer step, in words; empty if there is none."""
    if mostly_rejected:
        share = 100 * gradient.num_rejected / gradient.num_finite
        return (
            f"{share:.0f} % of the terms lie outside the bands that earlier training steps measured: the rollout or "
            "the trainer has changed"
        )
    if not gradient.num_kept:
        return "every term was rejected, or its group dropped"
    return "" if math.isfinite(gradient.norm) else "the gradient is not finite"


def _with_squares(parts: Sequence[Part], drift: ScoreDrift) -> list[Part]:
    """The parts with the squares of their terms' drift and signal, which are known once all are scored."""
    told = []
    for part, squares in zip(parts, drift.squares(), strict=True):
        assert part.terms is not None, "its drift was added with its terms"
        drift_square, gradient_square = (square.view_as(part.terms.log_prob) for square in squares)
        terms = replace(part.terms, drift_square=drift_square, gradient_square=gradient_square)
        told.append(replace(part, terms=terms))
    return told


def _loss_metrics(batch: ActorBatch, parts: Sequence[Part]) -> Metrics:
    """The metrics of a mini-batch's losses, under `actor/`."""
    is_zero = batch.advantages == 0
    zeros = {"actor/zero_advantage_fraction": mean(is_zero.sum(), is_zero.numel())}
    losses = Metrics(*(part.loss.metrics for part in parts))
    corrections = Metrics(*(part.loss.correction_metrics for part in parts))
    return Metrics(losses, zeros, corrections.prefixed("actor/"))


def _counted(batch: ActorBatch, samples: Tensor) -> LossOutput:
    """A loss of 0 for `samples` `[b]` that are not scored, with the counts of their finite and kept terms."""
    assert batch.old_log_probs is not None
    finite = batch.old_log_probs[samples].isfinite()
    kept = finite if batch.keep is None else finite & batch.keep[samples]
    loss = batch.old_log_probs.new_zeros(())
    return LossOutput(loss_sum=loss, count_all=finite.sum(), count_kept=kept.sum(), metrics=Metrics())


def deal_groups(group_ids: Tensor, parts: int, *, seed: int, training_step: int, epoch: int) -> Tensor:
    """Assign each sample `[B]` to a mini-batch, 0 to `parts - 1`.

    Of each `parts` consecutive groups, every mini-batch gets one, at random. So the groups of a rank, which are
    consecutive, are spread evenly, and the result does not depend on the number of ranks.
    """
    block, place = group_ids // parts, group_ids % parts
    dealt = torch.empty_like(group_ids)
    for number in block.unique().tolist():
        draw = sde.generator(seed, training_step, epoch, number, stream="mini batches")
        order = torch.randperm(parts, generator=draw).to(group_ids)
        dealt = torch.where(block == number, order[place], dealt)
    return dealt


def sum_over_ranks(gradients: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Tensor]:
    """Sum `gradients` over all ranks in place, and return the sums of `counts`, by one collective.

    The gradient of the loss sum, divided by the count of all ranks, is the gradient of the whole batch in any
    distribution over ranks. DistributedDataParallel does not fit: its hooks average, and expect equally many backward
    passes on every rank; here a rank may have fewer micro-batches than others, or none.
    """
    if distributed.world_size() == 1:
        return list(counts)
    tensors = [*gradients, torch.stack(list(counts))]
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    packed = torch.cat([tensor.flatten().to(dtype) for tensor in tensors])
    *sums, totals = distributed.add_up(packed, "the gradients of a mini-batch").split(
        [tensor.numel() for tensor in tensors]
    )
    for gradient, added in zip(gradients, sums, strict=True):
        gradient.copy_(added.view_as(gradient))
    return list(totals)
