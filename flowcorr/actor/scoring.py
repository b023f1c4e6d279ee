"""Scoring: log-probs and step means of SDE steps under the current policy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowcorr import distributed, sde
from flowcorr.actor.passes import Passes, is_bounded, passes_of
from flowcorr.actor.weights import TrainedWeights
from flowcorr.config.schema import Config, SamplingConfig
from flowcorr.errors import BatchError
from flowcorr.models import DTYPES, Guidance, ModelFamily
from flowcorr.models.base import repeated_blocks
from flowcorr.records import Rollout, Scores

Observe = Callable[[Rollout, Scores], None]
"""Called with each part of a batch as it is scored, and its scores with their means."""


class Scorer:
    """Scores the steps of a rollout with the trained transformer.

    Args:
        family: the pipeline.
        weights: its trained weights.
        config: the run's configuration.

    Attributes:
        rows: largest number of rows (one image at one step) in a pass, for `auto` keys; None until `bound_passes`.
    """

    def __init__(self, family: ModelFamily, weights: TrainedWeights, config: Config) -> None:
        self.family, self.weights, self.config = family, weights, config
        self._transformer: Any = weights.transformer
        self.rows: int | None = None
        if config.actor.compile:
            # One compilation serves all blocks of a kind, and any batch size. But each kind is compiled with and
            # without gradients and adapters, and beyond torch's limit of 8 compilations blocks run uncompiled.
            limits = torch._dynamo.config
            limits.recompile_limit = max(limits.recompile_limit, 64)
            for block in repeated_blocks(self._transformer):
                block.compile(dynamic=True)

    @property
    def guidance(self) -> Guidance:
        """Guidance of the run's sampling, rounded as by an engine of `rollout.dtype`; it is part of the policy."""
        return self.guidance_of(self.config.sampling)

    def guidance_of(self, sampling: SamplingConfig) -> Guidance:
        """Guidance of `sampling`, rounded as by an engine of `rollout.dtype`."""
        return self.family.guidance_in_dtype(Guidance.of(sampling), DTYPES[self.config.rollout.dtype])

    def score(self, rollout: Rollout, *, guidance: Guidance | None = None) -> Scores:
        """Score every step of `rollout` under the current policy, with gradients.

        Args:
            rollout: the samples.
            guidance: None for the run's.

        Returns:
            Log-probs, means and stds, `[b, T]`-first, at the rollout engine's own timesteps and sigmas.
        """
        if self.passes.folded or rollout.num_steps == 1:
            return self._score(rollout, guidance)
        steps = [self._score(rollout.step(t), guidance) for t in range(rollout.num_steps)]
        return Scores.concatenate(steps, dim=1)

    def score_finite(self, rollout: Rollout, dropped: Tensor) -> Scores:
        """Score samples; log-probs of a forward that is not finite become NaN and carry no gradient.

        With a mask in the loss alone, the gradient of such a sample would be 0 times infinity, so the other samples are
        scored again without it. Sharded weights allow no forward pass of one rank alone: there, a gradient that is not
        finite skips the update on all ranks.

        Args:
            rollout: the samples.
            dropped: `[B]` bool, samples to treat as not finite.
        """
        scores = self.score(rollout)
        finite = torch.isfinite(scores.log_probs.detach()).all(dim=1) & ~dropped
        if self.weights.sharded or finite.all():
            return scores
        scores = scores.detach()  # frees the graph before the next one is built
        rows = finite.nonzero().squeeze(1)
        log_probs, means = torch.full_like(scores.log_probs, math.nan), scores.means
        assert means is not None, "`score` returns them"
        if len(rows):
            rescored = self.score(rollout.select(rows))
            assert rescored.means is not None
            log_probs = log_probs.index_copy(0, rows, rescored.log_probs)
            means = means.index_copy(0, rows, rescored.means)
        return replace(scores, log_probs=log_probs, means=means)

    @torch.no_grad()
    def reference_means(self, rollout: Rollout) -> Tensor | None:
        """Step means `[B, T, *L]` of the reference policy, the model as it was loaded; None without `actor.kl_coef`."""
        if not self.config.actor.kl_coef:
            return None
        with self._reference():
            return self.score(rollout).means

    @property
    def passes(self) -> Passes:
        """Size of the passes that a batch is cut into."""
        return passes_of(self.config, self.rows)

    @property
    def is_measured(self) -> bool:
        """Whether the largest pass is known, or the configuration states it."""
        return self.rows is not None or not is_bounded(self.config.actor)

    @property
    def fitting(self) -> int:
        """Samples of a micro-batch that is thought to fit into the memory; 1 until that is measured."""
        return self.passes.samples if self.is_measured else 1

    def micro_batches(self, num_samples: int) -> list[slice]:
        """Slices of the samples that go through the transformer together."""
        size = self.passes.samples
        return [slice(begin, begin + size) for begin in range(0, num_samples, size)]

    def num_fillers(self, num_micro_batches: int, filler_sample: Rollout) -> int:
        """Number of filler micro-batches that this rank needs; 0 unless weights are sharded.

        A forward pass through sharded weights needs all ranks, so this is called before the first of them.

        Raises:
            BatchError: a rank has no sample to fill up with; on all ranks.
        """
        if not self.weights.sharded:
            return 0
        ranks = distributed.gather(
            (num_micro_batches, filler_sample.num_samples), "the number of micro-batches"
        )
        empty = [rank for rank, (_, samples) in enumerate(ranks) if not samples]
        if empty:
            raise BatchError(
                f"all samples of rank {empty[0]} were dropped, and actor.fsdp=True needs one on each rank; find out "
                "why the reward failed (reward.on_error), or use more prompts a rank (rollout.prompts_per_step) in "
                "a new run"
            )
        return max(count for count, _ in ranks) - num_micro_batches

    def _score(self, rollout: Rollout, guidance: Guidance | None) -> Scores:
        window, (samples, steps) = rollout.window, rollout.log_probs.shape
        latents, timesteps = window.latents.flatten(0, 1), window.timesteps.flatten()
        owners = torch.arange(samples, device=latents.device).repeat_interleave(steps)
        places = None
        if self.config.rollout.same_initial_noise and len(owners) > 1:
            # Images of a prompt that start from one noise have equal latents up to their first SDE step. The velocity
            # there is one row of the pass, in which the gradients of all of them meet.
            prompts = rollout.group_ids if rollout.conditioning_rows is None else rollout.conditioning_rows
            rows, places = distinct_inputs(latents, timesteps, prompts[owners])
            latents, timesteps, owners = latents[rows], timesteps[rows], owners[rows]
        with self.autocast():
            velocity = self.family.velocity(
                self._transformer,
                latents,
                timesteps,
                rollout.sample_conditioning(owners),
                self.guidance if guidance is None else guidance,
            )
        velocity = velocity if places is None else velocity[places]
        sampling = self.config.sampling
        step = sde.transition(
            sampling.sde_type,
            window.latents,
            velocity.unflatten(0, (samples, steps)),
            window.sigmas,
            window.sigmas_next,
            sampling.noise_level,
        )
        log_probs = sde.log_prob(window.next_latents, step, cps_unscaled=sampling.cps_unscaled)
        return Scores(log_probs=log_probs, means=step.mean, stds=step.std)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The precision of a forward pass; trained shards have FSDP's mixed precision instead of autocast."""
        if not self.config.actor.autocast or self.weights.trains_shards:
            return contextlib.nullcontext()
        return torch.autocast(self.weights.device.type, torch.bfloat16)

    @contextlib.contextmanager
    def _reference(self) -> Iterator[None]:
        """Score with the model as it was loaded: without its adapter, or with a copy of it."""
        transformer = self.weights.transformer
        if self.config.model.lora.rank:
            transformer.disable_adapters()
            try:
                yield
            finally:
                transformer.enable_adapters()
        else:
            self._transformer = self.weights.reference
            try:
                yield
            finally:
                self._transformer = transformer


def distinct_inputs(latents: Tensor, timesteps: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Find the rows of a pass that are not, to the bit, the first row of their prompt and timestep.

    Args:
        latents: `[n, *L]`.
        timesteps: `[n]`.
        prompts: `[n]`, a number for each conditioning.

    Returns:
        These rows `[m]` with the first ones, ascending, and for each row the place `[n]` of its inputs among them.
    """
    same = (prompts[:, None] == prompts) & (timesteps[:, None] == timesteps)
    first = same.int().argmax(1)  # of the rows with this prompt and timestep
    # A row is compared with that first one alone, so that the comparison grows with the rows and not with their square.
    equal = (latents == latents[first]).flatten(1).all(1)
    own = torch.arange(len(latents), device=latents.device)
    first = torch.where(equal, first, own)
    rows = (first == own).nonzero().squeeze(1)
    return rows, torch.searchsorted(rows, first)
