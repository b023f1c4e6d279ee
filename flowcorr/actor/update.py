"""Learning: optimizer steps on the policy loss of a batch."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from flowcorr import distributed, sde
from flowcorr.actor.adamw import OPTIMIZERS
from flowcorr.actor.loss_scale import LossScale
from flowcorr.actor.scoring import Observe, Scorer
from flowcorr.actor.weights import TrainedWeights
from flowcorr.algorithm import diffusion_loss
from flowcorr.algorithm.apply import sees_windows
from flowcorr.algorithm.bands import MOST_REJECTED, MeasuredBands
from flowcorr.algorithm.by_worker import by_worker
from flowcorr.algorithm.terms import batch_terms
from flowcorr.config.schema import ActorConfig, Config
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.distributed import fsdp
from flowcorr.losses import loss_of
from flowcorr.metrics import Metrics, mean, total
from flowcorr.records import ActorBatch, LossOutput, Rollout, Terms

logger = logging.getLogger(__name__)

BatchT = TypeVar("BatchT", ActorBatch, Rollout)
RecordPart = Callable[[ActorBatch, Terms], None]


class Record(Protocol):
    """Is told of each part of an update, as its loss sees it."""

    def __call__(self, part: ActorBatch, terms: Terms, *, before_update: bool) -> None:
        """A part was scored.

        Args:
            part: of the batch, with `places`.
            terms: of its loss.
            before_update: whether the weights were still those that the batch came with.
        """


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

    def update(
        self,
        batch: ActorBatch,
        correction: RolloutCorrectionConfig,
        *,
        training_step: int,
        record: Record | None = None,
        observe: Observe | None = None,
    ) -> Metrics:
        """Take `epochs * mini_batches` optimizer steps on a batch whose `old_log_probs` are known.

        Args:
            batch: the samples.
            correction: the rollout correction in force; in bypass mode it acts inside the loss.
            training_step: seeds the order of the mini-batches.
            record: called with each part of the batch, which then has `places`; see `Record`.
            observe: called with the parts that are scored before the first optimizer step; see `Observe`.

        Returns:
            `actor/*` metrics over the whole update. In bypass mode also `rollout_corr/*`: under `actor/` over the
            whole update, and as they are over the terms scored before the first optimizer step.
        """
        if record is not None:
            terms = batch.rollout.log_probs
            places = torch.arange(terms.numel(), device=terms.device).view_as(terms)
            batch = replace(batch, places=places)
        filler_sample = batch.rollout.select(slice(1))
        metrics = Metrics()
        untouched = True  # whether the weights are still those that the batch came with
        judged: list[Terms] = []
        for epoch in range(self.config.actor.epochs):
            for mini_batch in self.mini_batches(batch, training_step, epoch):
                observes = observe if untouched else None
                records = None if record is None else functools.partial(record, before_update=untouched)
                outputs = self._accumulate(mini_batch, correction, filler_sample, records, observes)
                if untouched:
                    judged += [output.judged for output in outputs if output.judged is not None]
                stepped, stats = self._step(outputs, correction)
                is_zero = mini_batch.advantages == 0
                zeros = {"actor/zero_advantage_fraction": mean(is_zero.sum(), is_zero.numel())}
                measured = Metrics.merged(output.correction_metrics for output in outputs)
                metrics = Metrics.merged(
                    [
                        metrics,
                        *(output.metrics for output in outputs),
                        stats,
                        Metrics.from_stats(zeros),
                        measured.prefixed("actor/"),
                        measured if untouched else Metrics(),
                    ]
                )
                untouched = untouched and not stepped
        bands = self.bands.observe(correction, judged, batch.rollout.num_elements)
        workers, steps = self.config.rollout.num_workers, self.config.sampling.num_inference_steps
        return Metrics.merged([metrics, by_worker(judged, workers, steps), bands])

    def mini_batches(self, batch: ActorBatch, training_step: int, epoch: int) -> Iterator[ActorBatch]:
        """The batch in `mini_batches` parts of whole groups, which do not depend on the number of ranks."""
        config = self.config
        parts = config.actor.mini_batches
        dealt = deal_groups(
            batch.rollout.group_ids, parts, seed=config.trainer.seed, training_step=training_step, epoch=epoch
        )
        for part in range(parts):
            yield batch.select((dealt == part).nonzero().squeeze(1))

    def _accumulate(
        self,
        batch: ActorBatch,
        correction: RolloutCorrectionConfig,
        filler_sample: Rollout,
        record: RecordPart | None,
        observe: Observe | None,
    ) -> list[LossOutput]:
        """Accumulate the gradient of a mini-batch's loss sum; a rank without samples adds zeros.

        Samples without a gradient are only counted. In bypass mode, where the correction inside the loss measures and
        rejects them, and for `record`, they are scored without a graph.

        A sample whose forward pass is not finite is dropped with all its steps. Where steps have a backward pass each,
        the earlier ones are in the gradient by then, so the mini-batch is run again without the sample.
        """
        whole_windows = sees_windows(self.config.actor, correction)
        is_read = record is not None or correction.mode == "bypass"
        has_gradient = self._has_gradient(batch.advantages, correction, is_read)
        learned, rest = (where.nonzero().squeeze(1) for where in (has_gradient, ~has_gradient))
        num_fillers = self.scorer.num_fillers(len(self.scorer.micro_batches(len(learned))), filler_sample)
        # Sharded weights allow no pass that other ranks do not make.
        one_unit = whole_windows or self.scorer.passes.folded or self.weights.sharded
        dropped = torch.zeros_like(batch.advantages, dtype=torch.bool)
        while True:
            self.adamw.zero_grad()
            outputs, finite = self._losses(
                batch, learned, dropped, correction, record, observe, whole_windows
            )
            if is_read:
                with torch.no_grad():
                    more, also = self._losses(
                        batch, rest, dropped, correction, record, observe, whole_windows
                    )
                outputs, finite = outputs + more, finite & also
            if one_unit or (finite | dropped).all():
                break
            dropped, observe = dropped | ~finite, None
        if not is_read:
            outputs.append(_counted(batch, rest))
        for _ in range(num_fillers):
            for rollout in self._backward_units(filler_sample, whole_windows):
                self.scorer.reference_means(rollout)
                (0.0 * self.scorer.score(rollout).log_probs.sum()).backward()
        return outputs

    def _has_gradient(self, advantages: Tensor, correction: RolloutCorrectionConfig, is_read: bool) -> Tensor:
        """Which samples `[B]` may have a gradient; that of the others is 0 whatever their scores are."""
        scaled = loss_of(self.config.actor, correction).scaled_by_advantage and not self.config.actor.kl_coef
        # Sharded weights want as many forward passes on every rank, with a graph or without one.
        if not scaled or (is_read and self.weights.sharded):
            return torch.ones_like(advantages, dtype=torch.bool)
        return advantages != 0

    def _losses(
        self,
        batch: ActorBatch,
        samples: Tensor,
        dropped: Tensor,
        correction: RolloutCorrectionConfig,
        record: RecordPart | None,
        observe: Observe | None,
        whole_windows: bool,
    ) -> tuple[list[LossOutput], Tensor]:
        """The loss of each micro-batch of the batch's `samples` `[b]`; its gradient is added to the others.

        Args:
            batch: the mini-batch.
            samples: places in the batch.
            dropped: `[B]` bool, samples that are left out, because a forward pass of them is not finite.
            correction, observe: as in `update`.
            record: called with each part and the terms of its loss.
            whole_windows: whether the loss takes whole windows.

        Returns:
            The losses, and for which samples `[B]` of the batch no forward pass was found that is not finite.
        """
        outputs, finite = [], torch.ones_like(dropped)
        for rows in self.scorer.micro_batches(len(samples)):
            places = samples[rows]
            for part in self._backward_units(batch.select(places), whole_windows):
                # Before the policy's graph takes memory.
                reference_means = self.scorer.reference_means(part.rollout)
                scores = self.scorer.score_finite(part.rollout, dropped[places])
                finite[places] &= scores.log_probs.detach().isfinite().all(1)
                if observe is not None:
                    observe(part.rollout, scores)
                terms = batch_terms(part, scores, reference_means)
                if record is not None:
                    record(part, terms)
                output = diffusion_loss(
                    terms if whole_windows else terms.per_term(),
                    self.config.actor,
                    correction,
                    num_steps=self.config.sampling.num_inference_steps,
                    noise=self.bands.noise,
                )
                if self.weights.sharded or output.loss_sum.requires_grad:
                    (self.loss_scale.value * output.loss_sum).backward()
                outputs.append(output)
        return outputs, finite

    def _backward_units(self, batch: BatchT, whole_windows: bool) -> list[BatchT]:
        """The parts of a micro-batch that each get a backward pass: its windows, or each of their steps."""
        if whole_windows or self.scorer.passes.folded:
            return [batch]
        return [batch.step(t) for t in range(self.config.sampling.sde_window_size)]

    def _step(
        self, outputs: Sequence[LossOutput], correction: RolloutCorrectionConfig
    ) -> tuple[bool, Metrics]:
        """Divide the accumulated gradient once by the count of all ranks, clip it, and step.

        No step is taken if the gradient is not finite, or no term is left, or measured bands rejected most of them.

        Returns:
            Whether a step was taken, and its metrics.
        """
        actor = self.config.actor
        zero = torch.zeros((), device=self.weights.device)
        loss_sum = sum((output.loss_sum.detach() for output in outputs), zero)
        kept = sum((output.count_kept for output in outputs), zero).float()
        finite_terms = sum((output.count_all for output in outputs), zero).float()
        over_all = self.config.algorithm.rollout_correction.rollout_rs_denominator == "all"
        counted = finite_terms if over_all else kept
        counts = self._divide_gradients(counted, [kept, finite_terms])
        norm = torch.nn.utils.clip_grad_norm_(self.weights.parameters.values(), actor.grad_clip)
        # The one read by the host of an optimizer step.
        values = torch.stack([fsdp.full_tensor(norm).double(), *(count.double() for count in counts)])
        grad_norm, num_kept, num_finite = values.tolist()
        finite = math.isfinite(grad_norm)
        self.loss_scale.observe(finite=finite)
        measures = correction.mode == "bypass" and correction.needs_batch
        most_rejected = measures and num_finite - num_kept > MOST_REJECTED * num_finite
        stepped = num_kept > 0 and finite and not most_rejected
        last = self.config.trainer.total_steps * actor.epochs * actor.mini_batches
        learning_rate = scheduled_lr(actor, self.weights.version, last)
        if stepped:
            self.adamw.step(learning_rate)
            self.weights.version += 1
            self.weights.update_average()
        elif most_rejected:
            logger.warning(
                "%.2g %% of the terms lie outside the bands that earlier training steps measured: the rollout or the "
                "trainer has changed; this update is skipped",
                100 * (num_finite - num_kept) / num_finite,
            )
        elif num_kept:
            logger.warning("the gradient is not finite; this update is skipped")
        else:
            logger.warning("every term was rejected, or its group dropped; this update is skipped")
        is_main = distributed.is_main()  # an update of all ranks is counted once
        stats = {
            "actor/loss": mean(loss_sum, counted),
            "actor/lr": mean(learning_rate, 1),
            "actor/grad_norm": mean(grad_norm if finite else 0.0, int(finite)),
            "actor/updates": total(int(stepped and is_main)),
            "actor/skipped_updates": total(int(not stepped and is_main)),
        }
        if measures:
            stats["actor/mostly_rejected_updates"] = total(int(most_rejected and is_main))
        return stepped, Metrics.from_stats(stats)

    def _divide_gradients(self, counted: Tensor, counts: Sequence[Tensor]) -> list[Tensor]:
        """Turn each rank's gradient of its scaled loss sum into that of the whole mini-batch's mean.

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
        torch._foreach_div_(gradients, self.loss_scale.value * counted.clamp(min=1))
        return totals


def _counted(batch: ActorBatch, samples: Tensor) -> LossOutput:
    """The loss of `samples` `[b]` that are not scored: 0, over the terms whose old log-probs are finite."""
    assert batch.old_log_probs is not None
    finite = batch.old_log_probs[samples].isfinite()
    kept = finite if batch.keep is None else finite & batch.keep[samples]
    loss = batch.old_log_probs.new_zeros(())
    return LossOutput(loss_sum=loss, count_all=finite.sum(), count_kept=kept.sum(), metrics=Metrics())


def deal_groups(group_ids: Tensor, parts: int, *, seed: int, training_step: int, epoch: int) -> Tensor:
    """The mini-batch, 0 to `parts - 1`, of each sample `[B]`.

    Each block of `parts` consecutive groups deals one group to every mini-batch, at random. So the groups of a rank,
    which are consecutive, are spread evenly, and nothing depends on the number of ranks.
    """
    block, place = group_ids // parts, group_ids % parts
    dealt = torch.empty_like(group_ids)
    for number in block.unique().tolist():
        draw = sde.generator(seed, training_step, epoch, number, stream="mini batches")
        order = torch.randperm(parts, generator=draw).to(group_ids)
        dealt = torch.where(block == number, order[place], dealt)
    return dealt


def sum_over_ranks(gradients: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Tensor]:
    """Add `gradients` up over all ranks in place, and return the added `counts`, by one collective.

    Loss sums and counts add up, so that dividing once afterwards gives the gradient of the whole batch however it is
    spread over ranks. DistributedDataParallel does not fit: its hooks average, and expect equally many backward
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


def scheduled_lr(actor: ActorConfig, update: int, num_updates: int) -> float:
    """The learning rate of an update: a linear warm-up, then `lr_schedule` down to `lr_min_ratio` of it.

    Args:
        actor: the keys.
        update: how many optimizer updates were made before.
        num_updates: of the whole run.
    """
    if update < actor.warmup_steps:
        return actor.lr * (update + 1) / actor.warmup_steps
    progress = min(1.0, (update - actor.warmup_steps) / max(num_updates - actor.warmup_steps, 1))
    falls = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return actor.lr * (actor.lr_min_ratio + (1 - actor.lr_min_ratio) * falls[actor.lr_schedule])
