"""The diffusion actor: scores SDE steps under the current policy and takes optimizer steps on them."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowcorr import lora, sde
from flowcorr.algorithm import diffusion_loss
from flowcorr.config.schema import Config
from flowcorr.errors import BatchError
from flowcorr.metrics import Metrics, mean, total
from flowcorr.models import Guidance, ModelFamily
from flowcorr.records import ActorBatch, BatchStep, LossOutput, PolicyStep, Rollout
from flowcorr.rollout.base import Weights

logger = logging.getLogger(__name__)


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
    """

    def __init__(self, family: ModelFamily, config: Config) -> None:
        self.family = family
        self.config = config
        actor, sampling = config.actor, config.sampling
        self.guidance = Guidance(
            guidance_scale=sampling.guidance_scale,
            true_cfg_scale=sampling.true_cfg_scale,
            negative_prompt=sampling.negative_prompt,
        )
        self.transformer: Any = family.transformer
        self.base = copy.deepcopy(self.transformer) if self._needs_base() else self.transformer
        if config.model.lora.rank:
            lora.add_adapter(self.transformer, family, config.model.lora, seed=config.trainer.seed)
        else:
            self.transformer.requires_grad_(True)
        if actor.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self.parameters = {
            name: parameter
            for name, parameter in self.transformer.named_parameters()
            if parameter.requires_grad
        }
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=actor.lr, betas=actor.betas, weight_decay=actor.weight_decay
        )
        self.version = 0
        self.ema = self.snapshot().tensors if actor.ema is not None else None
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
        size = self.config.actor.micro_batch_size or rollout.num_samples
        scores = [
            self.score(rollout.select(slice(begin, begin + size)))
            for begin in range(0, rollout.num_samples, size)
        ]
        means = torch.cat([score.mean for score in scores]) if with_means else None
        return Scores(log_probs=torch.cat([score.log_prob for score in scores]), means=means)

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

    # Learning --------------------------------------------------------------------------------------------

    def update(self, batch: ActorBatch, *, training_step: int) -> Metrics:
        """Take `epochs * mini_batches` optimizer steps on a batch whose `old_log_probs` are known.

        Returns:
            `actor/*` metrics over the whole update; in bypass also `rollout_corr/*`, from the terms that were
            scored before the first optimizer step.
        """
        metrics = Metrics()
        first = True
        for epoch in range(self.config.actor.epochs):
            for mini_batch in self._mini_batches(batch, training_step, epoch):
                seen, stepped = self._optimizer_step(mini_batch)
                corrected = seen.under("rollout_corr/")
                metrics = metrics.merge(seen.under("actor/")).merge(corrected.prefixed("actor/"))
                if first:
                    metrics = metrics.merge(corrected)
                first = first and not stepped
        return metrics

    def _mini_batches(self, batch: ActorBatch, training_step: int, epoch: int) -> Iterator[ActorBatch]:
        """The batch in `mini_batches` parts of whole groups, shuffled."""
        group_ids = batch.rollout.group_ids
        groups = group_ids.unique()
        draw = sde.generator(self.config.trainer.seed, training_step, epoch, 0, stream="mini batches")
        order = groups[torch.randperm(len(groups), generator=draw).to(groups.device)]
        for part in order.tensor_split(min(self.config.actor.mini_batches, len(groups))):
            yield batch.select(torch.isin(group_ids, part).nonzero().squeeze(1))

    def _optimizer_step(self, batch: ActorBatch) -> tuple[Metrics, bool]:
        """Accumulate the gradient of a mini-batch's loss sum, divide it once by the count, and step."""
        actor = self.config.actor
        self.optimizer.zero_grad(set_to_none=True)
        outputs: list[LossOutput] = []
        size = actor.micro_batch_size or batch.rollout.num_samples
        for begin in range(0, batch.rollout.num_samples, size):
            outputs += self._backward(batch.select(slice(begin, begin + size)))
        metrics = Metrics.merged(output.metrics for output in outputs)
        zero = torch.zeros((), device=self.device)
        loss_sum = sum((output.loss_sum.detach() for output in outputs), zero)
        kept = sum((output.count_kept for output in outputs), zero)
        counted = (
            kept if self._denominator() == "kept" else sum((output.count_all for output in outputs), zero)
        )
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        kept, denominator = sum_over_ranks(gradients, [kept.float(), counted.float()])
        torch._foreach_div_(gradients, denominator.clamp(min=1))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), actor.grad_clip)
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
            logger.warning("every term was rejected; this update is skipped")
        finite = math.isfinite(grad_norm)
        stats = {
            "actor/loss": mean(loss_sum, counted),
            "actor/lr": mean(learning_rate, 1),
            "actor/grad_norm": mean(grad_norm if finite else 0.0, int(finite)),
            "actor/updates": total(int(stepped and _is_first_rank())),
            "actor/skipped_updates": total(int(not stepped and _is_first_rank())),
        }
        return metrics.merge(Metrics.from_stats(stats)), stepped

    def _backward(self, batch: ActorBatch) -> list[LossOutput]:
        """Backward through one micro-batch."""
        whole = self._trajectory_terms or self.config.actor.fold_steps
        outputs = []
        for piece in [batch] if whole else [batch.step(t) for t in range(batch.rollout.num_steps)]:
            output = self._loss(self._score_finite(piece.rollout), piece)
            if output.loss_sum.requires_grad:
                output.loss_sum.backward()
            outputs.append(output)
        return outputs

    def _score_finite(self, rollout: Rollout) -> PolicyStep:
        """`score`, where samples whose forward is not finite have a log-prob of NaN and carry no gradient.

        A mask in the loss would be too late for them: behind it, their gradient is 0 times infinity.
        """
        policy = self.score(rollout)
        finite = torch.isfinite(policy.log_prob).all(dim=1)
        if finite.all():
            return policy
        rows = finite.nonzero().squeeze(1)
        log_prob, mean = torch.full_like(policy.log_prob.detach(), math.nan), policy.mean.detach()
        if len(rows):
            rest = self.score(rollout.select(rows))
            log_prob, mean = log_prob.index_copy(0, rows, rest.log_prob), mean.index_copy(0, rows, rest.mean)
        return replace(policy, log_prob=log_prob, mean=mean)

    def _loss(self, policy: PolicyStep, batch: ActorBatch) -> LossOutput:
        step = BatchStep.of(batch, self._reference_means(batch.rollout))
        if not self._trajectory_terms:
            policy, step = policy.per_term(), step.per_term()
        return diffusion_loss(
            policy,
            step,
            self.config.actor,
            self.config.algorithm.rollout_correction,
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
        """The policy before training: without its adapter, or the untrained copy."""
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
        """A copy of the trained weights."""
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
            parameter.copy_(tensors[name])

    def merged_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The transformer's state dict under diffusers' names, with `tensors` in place of the trained weights."""
        return lora.merged_state_dict(self.transformer, tensors)

    def save_adapter(self, folder: Path) -> None:
        """Write what a pipeline needs to use the trained weights.

        An adapter, averaged if there is an average, goes to a file that the pipeline's `load_lora_weights`
        reads; without an adapter the whole transformer goes to `transformer/`, which `from_pretrained` reads.
        """
        with self.averaged():
            if self.config.model.lora.rank:
                metadata = lora.adapter_metadata(self.transformer)
                self.family.save_lora(str(folder), lora.adapter_state(self.transformer), metadata)
            else:
                self.transformer.save_pretrained(folder / "transformer")

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate under the averaged weights, where there are any."""
        if self.ema is None:
            yield
            return
        current = self.snapshot().tensors
        self.load_weights(self.ema)
        try:
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
            entries.setdefault(places[name], {})[moment] = value.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})

    @torch.no_grad()
    def _average(self) -> None:
        decay = self.config.actor.ema
        if decay is None or self.ema is None:
            return
        for name, parameter in self.parameters.items():
            self.ema[name].lerp_(parameter, 1 - decay)

    def _needs_base(self) -> bool:
        """Whether the untrained transformer is kept: for an engine that cannot share ours, or as the reference.

        An engine in processes of its own has read the model itself.
        """
        rollout, model = self.config.rollout, self.config.model
        differs = rollout.staleness or rollout.emulate != "none" or rollout.dtype != model.dtype
        reference = self.config.actor.kl_coef and not model.lora.rank
        return bool((rollout.name == "in_process" and differs) or reference)


def sum_over_ranks(gradients: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Tensor]:
    """Add `gradients` up over all ranks in place, and return the added `counts`, by one collective.

    Loss sums and counts add up, so that dividing once afterwards gives the gradient of the whole batch
    however it is spread over ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(counts)
    packed = torch.cat([*(gradient.flatten().float() for gradient in gradients), torch.stack(list(counts))])
    dist.all_reduce(packed)
    *sums, totals = packed.split([*(gradient.numel() for gradient in gradients), len(counts)])
    for gradient, added in zip(gradients, sums, strict=True):
        gradient.copy_(added.view_as(gradient))
    return list(totals)


def _is_first_rank() -> bool:
    """Whether this rank counts what all ranks do together."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _trajectory_scope(config: Config) -> bool:
    correction = config.algorithm.rollout_correction
    return correction is not None and correction.bypass_mode and correction.bypass_scope == "trajectory"
