"""The diffusion actor: scores SDE steps under the current policy and takes optimizer steps on them."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowcorr import distributed, fsdp, lora, sde
from flowcorr.algorithm import AutoMode, ClipCenter, centers_clip, diffusion_loss
from flowcorr.config.schema import Config
from flowcorr.errors import BatchError
from flowcorr.metrics import Metrics, mean, total
from flowcorr.models import Guidance, ModelFamily
from flowcorr.records import ActorBatch, BatchStep, LossOutput, PolicyStep, Rollout
from flowcorr.rollout.base import Weights, needs_base

logger = logging.getLogger(__name__)

Record = Callable[[ActorBatch, PolicyStep], None]
BatchT = TypeVar("BatchT", ActorBatch, Rollout)
WEIGHTS = "diffusion_pytorch_model{suffix}.safetensors"  # as `from_pretrained` looks for them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Log-probs `[B, T]` of a batch without gradients, with step means `[B, T, *L]` where asked for."""

    log_probs: Tensor
    means: Tensor | None


class DiffusionActor:
    """Owns the trained transformer, its optimizer and, if configured, an average of its weights.

    Args:
        family: the loaded pipeline; its transformer gets the adapter.
        config: the run's configuration.

    Attributes:
        correction: the rollout correction in force; with `bypass_mode: auto` the trainer sets that of each step.
        spare: any sample, for forward passes that only keep pace with other ranks; the trainer sets it where weights
            are sharded, since a rank may have no sample of its own to score.
    """

    def __init__(self, family: ModelFamily, config: Config) -> None:
        self.family = family
        self.config = config
        self.correction = AutoMode.of(config).correction
        actor, sampling = config.actor, config.sampling
        self.guidance = Guidance(
            guidance_scale=sampling.guidance_scale,
            true_cfg_scale=sampling.true_cfg_scale,
            negative_prompt=sampling.negative_prompt,
        )
        self.transformer: Any = family.transformer
        self.base = self._untrained()
        if config.model.lora.rank:
            lora.add_adapter(self.transformer, family, config.model.lora, seed=config.trainer.seed)
        else:
            self.transformer.requires_grad_(True)
            self._architecture = self.transformer.to_json_string()  # before FSDP renames the class
        if actor.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self.sharded = actor.fsdp and distributed.world_size() > 1
        self.spare: Rollout | None = None
        if self.sharded:
            fsdp.shard(self.transformer)
        self.parameters = {
            name: parameter
            for name, parameter in self.transformer.named_parameters()
            if parameter.requires_grad
        }
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=actor.lr, betas=actor.betas, weight_decay=actor.weight_decay
        )
        self.version = 0
        self.ema = None if actor.ema is None else _in_float32(self.snapshot().tensors)
        self.clip_center = (
            ClipCenter.unknown(sampling.num_inference_steps, self.device) if centers_clip(config) else None
        )
        self._forward = torch.compile(self.transformer) if actor.compile else self.transformer
        self._trajectory_terms = actor.ratio_level != "step" or _trajectory_scope(config)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    # Scoring ---------------------------------------------------------------------------------------------

    def score(self, rollout: Rollout) -> PolicyStep:
        """Score every step of `rollout` under the current policy, with gradients.

        Returns:
            Log-probs, means, stds and step sizes, `[b, T]`-first. The timesteps are fed as the rollout engine
            fed them, and the sigmas come from its schedule.
        """
        if self.config.actor.fold_steps or rollout.num_steps == 1:
            return self._score(rollout)
        steps = [self._score(rollout.step(t)) for t in range(rollout.num_steps)]
        return PolicyStep(
            **{
                name: torch.cat([getattr(step, name) for step in steps], dim=1)
                for name in ("log_prob", "mean", "std", "step")
            }
        )

    @torch.no_grad()
    def log_probs(self, rollout: Rollout, *, with_means: bool = False) -> Scores:
        """Recompute the log-probs of a whole batch, in micro-batches and without gradients."""
        parts = self._micro_batches(rollout.num_samples)
        missing = self._missing_forwards(len(parts))
        log_probs, means = [rollout.log_probs[:0]], [rollout.latents[:0, 1:]]
        for part in parts:
            score = self.score(rollout.select(part))
            log_probs.append(score.log_prob)
            if with_means:
                means.append(score.mean)
        for spare in missing:
            self.score(spare)
        return Scores(log_probs=torch.cat(log_probs), means=torch.cat(means) if with_means else None)

    def _score(self, rollout: Rollout) -> PolicyStep:
        samples, steps = rollout.log_probs.shape
        latents = rollout.latents[:, :-1]
        conditioning = {name: rows.repeat_interleave(steps, 0) for name, rows in rollout.conditioning.items()}
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.actor.autocast)
        with autocast:
            velocity = self.family.velocity(
                self._forward, latents.flatten(0, 1), rollout.timesteps.flatten(), conditioning, self.guidance
            )
        sampling = self.config.sampling
        step = sde.transition(
            sampling.sde_type,
            latents,
            velocity.unflatten(0, (samples, steps)),
            rollout.sigmas,
            rollout.sigmas_next,
            sampling.noise_level,
        )
        log_prob = sde.log_prob(rollout.latents[:, 1:], step, cps_unscaled=sampling.cps_unscaled)
        return PolicyStep(log_prob=log_prob, mean=step.mean, std=step.std, step=step.step)

    def _micro_batches(self, num_samples: int) -> list[slice]:
        size = self.config.actor.micro_batch_size or max(num_samples, 1)
        return [slice(begin, begin + size) for begin in range(0, num_samples, size)]

    def _missing_forwards(self, count: int) -> list[Rollout]:
        """Samples for the forward passes of other ranks beyond the `count` of this one, which sharded weights need."""
        if not self.sharded:
            return []
        assert self.spare is not None, "the trainer sets `spare` before it scores"
        return (max(distributed.gather(count, "the number of forward passes")) - count) * [self.spare]

    # Learning --------------------------------------------------------------------------------------------

    def update(self, batch: ActorBatch, *, training_step: int, record: Record | None = None) -> Metrics:
        """Take `epochs * mini_batches` optimizer steps on a batch whose `old_log_probs` are known.

        Args:
            batch: the samples.
            training_step: seeds the order of the mini-batches.
            record: given each part of the batch, with its `places`, and the scores that its loss is computed from.

        Returns:
            `actor/*` metrics over the whole update. In bypass, what else the loss measures, as `rollout_corr/*`, once
            under `actor/` over the whole update and once over the terms scored before the first optimizer step.
        """
        metrics = Metrics()
        first = True
        center = None if self.clip_center is None else self.clip_center.older()
        if record is not None:
            terms = batch.rollout.log_probs
            places = torch.arange(terms.numel(), device=terms.device).view_as(terms)
            batch = replace(batch, places=places)
        for epoch in range(self.config.actor.epochs):
            for mini_batch in self._mini_batches(batch, training_step, epoch):
                if center is not None:
                    mini_batch = replace(mini_batch, clip_centers=center.at(mini_batch.rollout.step_indices))
                seen, stepped, drifts = self._optimizer_step(mini_batch, record)
                corrected = seen.beside("actor/")
                metrics = metrics.merge(seen.under("actor/")).merge(corrected.prefixed("actor/"))
                if first:
                    metrics = metrics.merge(corrected)
                if first and center is not None:
                    drift = sum(drifts, torch.zeros_like(center.sums))
                    center = center.plus(distributed.add_up(drift, "the drift of a mini-batch"))
                first = first and not stepped
        if center is not None:
            self.clip_center = center
            metrics = metrics.merge(center.metrics())
        return metrics

    def _mini_batches(self, batch: ActorBatch, training_step: int, epoch: int) -> Iterator[ActorBatch]:
        """The batch in `mini_batches` parts of whole groups, the same whatever ranks the groups are on."""
        config = self.config
        parts = min(config.actor.mini_batches, config.rollout.prompts_per_step)
        dealt = deal_groups(
            batch.rollout.group_ids, parts, seed=config.trainer.seed, training_step=training_step, epoch=epoch
        )
        for part in range(parts):
            yield batch.select((dealt == part).nonzero().squeeze(1))

    def _optimizer_step(self, batch: ActorBatch, record: Record | None) -> tuple[Metrics, bool, list[Tensor]]:
        """Accumulate the gradient of a mini-batch's loss sum, divide it once by the count, and step.

        A rank without samples in this mini-batch takes part with zeros.

        Returns:
            Metrics, whether a step was taken, and the `drift` of each micro-batch where the clip range is centred.
        """
        actor = self.config.actor
        self.optimizer.zero_grad(set_to_none=True)
        outputs: list[LossOutput] = []
        parts = self._micro_batches(batch.rollout.num_samples)
        missing = self._missing_forwards(len(parts))
        for part in parts:
            outputs += self._backward(batch.select(part), record)
        for spare in missing:
            for piece in self._pieces(spare):
                (0.0 * self.score(piece).log_prob.sum()).backward()
        metrics = Metrics.merged(output.metrics for output in outputs)
        zero = torch.zeros((), device=self.device)
        loss_sum = sum((output.loss_sum.detach() for output in outputs), zero)
        kept = sum((output.count_kept for output in outputs), zero)
        counted = (
            kept if self._denominator() == "kept" else sum((output.count_all for output in outputs), zero)
        )
        kept = self._divide_gradients(kept.float(), counted.float())
        norm = fsdp.whole(torch.nn.utils.clip_grad_norm_(self.parameters.values(), actor.grad_clip))
        grad_norm, num_kept = torch.stack([norm.double(), kept.double()]).tolist()
        learning_rate = actor.lr * min(1.0, (self.version + 1) / max(actor.warmup_steps, 1))
        stepped = num_kept > 0 and math.isfinite(grad_norm)
        if stepped:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.version += 1
            self._average()
        elif num_kept:
            logger.warning("the gradient is not finite; this update is skipped")
        else:
            logger.warning("every term was rejected, or its group dropped; this update is skipped")
        finite = math.isfinite(grad_norm)
        counts_it = distributed.is_main()  # what all ranks do together is counted once
        stats = {
            "actor/loss": mean(loss_sum, counted),
            "actor/lr": mean(learning_rate, 1),
            "actor/grad_norm": mean(grad_norm if finite else 0.0, int(finite)),
            "actor/updates": total(int(stepped and counts_it)),
            "actor/skipped_updates": total(int(not stepped and counts_it)),
        }
        drifts = [output.drift for output in outputs if output.drift is not None]
        return metrics.merge(Metrics.from_stats(stats)), stepped, drifts

    def _divide_gradients(self, kept: Tensor, counted: Tensor) -> Tensor:
        """Turn each rank's gradient of its loss sum into that of the whole mini-batch's mean.

        Returns:
            The kept terms of all ranks.
        """
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [
            fsdp.part(parameter.grad) for parameter in self.parameters.values() if parameter.grad is not None
        ]
        if self.sharded:
            kept, counted = sum_over_ranks([], [kept, counted])
            torch._foreach_mul_(gradients, distributed.world_size())  # FSDP has averaged them over the ranks
        else:
            kept, counted = sum_over_ranks(gradients, [kept, counted])
        torch._foreach_div_(gradients, counted.clamp(min=1))
        return kept

    def _backward(self, batch: ActorBatch, record: Record | None) -> list[LossOutput]:
        """Backward through one micro-batch."""
        outputs = []
        for piece in self._pieces(batch):
            reference = self._reference_means(piece.rollout)  # before the policy's graph takes memory
            policy = self._score_finite(piece.rollout)
            if record is not None:
                record(piece, policy)
            output = self._loss(policy, piece, reference)
            if self.sharded or output.loss_sum.requires_grad:
                output.loss_sum.backward()
            outputs.append(output)
        return outputs

    def _pieces(self, batch: BatchT) -> list[BatchT]:
        """What a loss is computed of at a time: whole windows, or one step of them."""
        if self._trajectory_terms or self.config.actor.fold_steps:
            return [batch]
        return [batch.step(t) for t in range(self.config.sampling.sde_window_size)]

    def _score_finite(self, rollout: Rollout) -> PolicyStep:
        """`score`, where samples whose forward is not finite have a log-prob of NaN and carry no gradient.

        Scored step by step, a sample loses the steps that are not finite, and its others have had their gradient.

        A mask in the loss would be too late for them: behind it, their gradient is 0 times infinity. Sharded weights
        allow of no further forward pass that other ranks do not make: there, such a gradient skips the update.
        """
        policy = self.score(rollout)
        finite = torch.isfinite(policy.log_prob).all(dim=1)
        if self.sharded or finite.all():
            return policy
        rows = finite.nonzero().squeeze(1)
        log_prob, mean = torch.full_like(policy.log_prob.detach(), math.nan), policy.mean.detach()
        if len(rows):
            rest = self.score(rollout.select(rows))
            log_prob, mean = log_prob.index_copy(0, rows, rest.log_prob), mean.index_copy(0, rows, rest.mean)
        return replace(policy, log_prob=log_prob, mean=mean)

    def _loss(self, policy: PolicyStep, batch: ActorBatch, reference_means: Tensor | None) -> LossOutput:
        step = BatchStep.of(batch, reference_means)
        if not self._trajectory_terms:
            policy, step = policy.per_term(), step.per_term()
        return diffusion_loss(
            policy,
            step,
            self.config.actor,
            self.correction,
            num_steps=self.config.sampling.num_inference_steps,
        )

    @torch.no_grad()
    def _reference_means(self, rollout: Rollout) -> Tensor | None:
        if not self.config.actor.kl_coef:
            return None
        with self._reference():
            return self.score(rollout).mean

    @contextlib.contextmanager
    def _reference(self) -> Iterator[None]:
        """The model as it was loaded: without its adapter, a warm start included, or the untrained copy."""
        if self.config.model.lora.rank:
            self.transformer.disable_adapters()
            try:
                yield
            finally:
                self.transformer.enable_adapters()
        else:
            forward, self._forward = self._forward, self.base
            try:
                yield
            finally:
                self._forward = forward

    def _denominator(self) -> str:
        correction = self.config.algorithm.rollout_correction
        return "kept" if correction is None else correction.rollout_rs_denominator

    # Weights ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Weights:
        """A copy of the trained weights; of sharded ones, each rank copies its part."""
        tensors = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        return Weights(version=self.version, tensors=tensors)

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the trained weights.

        Raises:
            BatchError: names or shapes differ from the trained weights'.
        """
        if tensors.keys() != self.parameters.keys():
            odd = sorted(tensors.keys() ^ self.parameters.keys())
            raise BatchError(
                f"the weights belong to another adapter or model: {len(odd)} names differ, as {odd[0]}"
            )
        for name, parameter in self.parameters.items():
            if parameter.shape != tensors[name].shape:
                raise BatchError(
                    f"the weights belong to another adapter or model: {name} has shape "
                    f"{list(tensors[name].shape)} instead of {list(parameter.shape)}"
                )
            parameter.copy_(fsdp.laid_out_as(parameter, tensors[name]))

    def laid_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tensors` by name of a trained weight, on its device, and sharded if it is."""
        return {name: fsdp.laid_out_as(self.parameters[name], tensor) for name, tensor in tensors.items()}

    def merged_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The transformer's state dict under diffusers' names, with `tensors` in place of the trained weights.

        Every rank gets whole tensors, and where they are sharded every rank has to ask for them.
        """
        merged = lora.merged_state_dict(self.transformer, tensors)
        return {name: fsdp.whole(tensor) for name, tensor in merged.items()}

    def exported(self) -> dict[str, Tensor]:
        """What `save_adapter` writes, as it is now, on the CPU: averaged if there is an average.

        Where weights are sharded, every rank has to ask for it, and the main one gets it.
        """
        with self.averaged():
            adapted = self.config.model.lora.rank > 0
            state = lora.adapter_state(self.transformer) if adapted else self.transformer.state_dict()
            return {name: value.to("cpu", copy=True) for name, value in fsdp.collected(state).items()}

    def save_adapter(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write what a pipeline needs to use the trained weights.

        An adapter goes to a file that the pipeline's `load_lora_weights` reads; without an adapter the whole
        transformer goes to `transformer/`, which `from_pretrained` reads.

        Args:
            folder: where to.
            tensors: what `exported` gave; None takes it now.
        """
        tensors = self.exported() if tensors is None else tensors
        if self.config.model.lora.rank:
            self.family.save_lora(str(folder), tensors, lora.adapter_metadata(self.transformer))
        else:
            from huggingface_hub import save_torch_state_dict

            (folder / "transformer").mkdir(parents=True, exist_ok=True)
            (folder / "transformer" / self.transformer.config_name).write_text(self._architecture)
            save_torch_state_dict(dict(tensors), folder / "transformer", filename_pattern=WEIGHTS)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate under the averaged weights, where there are any."""
        with contextlib.nullcontext() if self.ema is None else self.under(self.ema):
            yield

    @contextlib.contextmanager
    def under(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Score under other weights; the present ones come back bit for bit, after an exception too."""
        current = self.snapshot().tensors
        try:
            self.load_weights(tensors)
            yield
        finally:
            self.load_weights(current)

    def optimizer_state(self) -> dict[str, Tensor]:
        """AdamW's moments and step counts by parameter name."""
        names = list(self.parameters)
        return {
            f"{names[index]}.{key}": value
            for index, entry in self.optimizer.state_dict()["state"].items()
            for key, value in entry.items()
        }

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `optimizer_state` gave."""
        entries: dict[int, dict[str, Any]] = {}
        places = {name: index for index, name in enumerate(self.parameters)}
        for key, value in state.items():
            name, moment = key.rsplit(".", 1)
            value = value if moment == "step" else fsdp.laid_out_as(self.parameters[name], value)
            entries.setdefault(places[name], {})[moment] = value.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})

    @torch.no_grad()
    def _average(self) -> None:
        decay = self.config.actor.ema
        if decay is None or self.ema is None:
            return
        for name, parameter in self.parameters.items():
            average = self.ema[name]
            average.lerp_(parameter.to(average.dtype), 1 - decay)

    def _untrained(self) -> Any:
        """A copy of the transformer as it is before training, or itself where nobody needs one.

        As the reference it stays on the device; an engine that cannot share ours makes its own of it, so it waits in
        the host's memory for that. An engine in processes of its own has read the model itself.
        """
        if self.config.actor.kl_coef and not self.config.model.lora.rank:
            return copy.deepcopy(self.transformer)
        if self.config.rollout.placement == "local" and needs_base(self.config):
            return torch.nn.Module.to(copy.deepcopy(self.transformer), "cpu")
        return self.transformer


def _in_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In at least that: an average of bfloat16 would not move by thousandths."""
    return {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for name, tensor in tensors.items()
    }


def deal_groups(group_ids: Tensor, parts: int, *, seed: int, training_step: int, epoch: int) -> Tensor:
    """The mini-batch, 0 to `parts - 1`, of each sample `[B]`.

    Each block of `parts` consecutive groups deals one group to every mini-batch, at random. So consecutive groups,
    such as a rank owns, are spread evenly, no rank waits for another, and nothing depends on how many ranks there are.
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
    spread over ranks. DistributedDataParallel would do neither: its hooks average, and want equally many backward
    passes on every rank, where here a rank may have fewer micro-batches than others, or none.
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


def _trajectory_scope(config: Config) -> bool:
    correction = config.algorithm.rollout_correction
    return correction is not None and correction.bypass_mode and correction.bypass_scope == "trajectory"
