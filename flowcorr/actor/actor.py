"""The diffusion actor: the trained policy, which scores SDE steps and learns from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowcorr.actor.pass_bound import bound_passes
from flowcorr.actor.scoring import Observe, Scorer
from flowcorr.actor.update import PolicyOptimizer
from flowcorr.actor.weights import TrainedWeights
from flowcorr.config.schema import Config
from flowcorr.models import Guidance, ModelFamily
from flowcorr.records import Rollout, Scores


class DiffusionActor:
    """The policy that is trained.

    Args:
        family: the loaded pipeline; its transformer gets the adapter.
        config: the run's configuration.

    Attributes:
        weights: the trained weights, with their average and their files.
        scorer: scores SDE steps under the weights.
        optimizer: learns the weights.
        score: that of `Scorer`.
        update: that of `PolicyOptimizer`.
    """

    def __init__(self, family: ModelFamily, config: Config) -> None:
        self.family, self.config = family, config
        self.weights = TrainedWeights(family, config)
        if config.actor.gradient_checkpointing:
            self.weights.transformer.enable_gradient_checkpointing()
        self.scorer = Scorer(family, self.weights, config)
        self.optimizer = PolicyOptimizer(self.weights, self.scorer, config)
        self.score = self.scorer.score
        self.update = self.optimizer.update

    @torch.no_grad()
    def log_probs(
        self,
        rollout: Rollout,
        *,
        with_means: bool = False,
        guidance: Guidance | None = None,
        filler_sample: Rollout | None = None,
        observe: Observe | None = None,
    ) -> Scores:
        """Recompute the log-probs of a whole batch without gradients, in passes that fit the memory.

        Args:
            rollout: the batch.
            with_means: also return the step means.
            guidance: None for the run's.
            filler_sample: a sample for a rank with fewer micro-batches than others, which scores it to stay in step
                with them. Needed for sharded weights if a rank's batch may be empty; None takes the batch's first.
            observe: see `Observe`.
        """
        bound_passes(self.scorer, rollout)
        micro_batches = self.scorer.micro_batches(rollout.num_samples)
        filler_sample = rollout.select(slice(1)) if filler_sample is None else filler_sample
        num_fillers = self.scorer.num_fillers(len(micro_batches), filler_sample)
        means = rollout.window.latents[:0] if with_means else None
        none = rollout.log_probs[:0]
        parts = [Scores(log_probs=none, means=means, stds=none)]
        for rows in micro_batches:
            part = rollout.select(rows)
            scores = self.score(part, guidance=guidance)
            if observe is not None:
                observe(part, scores)
            parts.append(scores if with_means else replace(scores, means=None))
        for _ in range(num_fillers):
            self.score(filler_sample)
        return Scores.concatenate(parts)

    @property
    def guidance(self) -> Guidance:
        """Guidance of the run's sampling, see `Scorer.guidance`."""
        return self.scorer.guidance

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def velocity(
        self, conditioning: Mapping[str, Tensor], transformer: Any = None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """The policy's velocity, `(latents [B, *L], timesteps [B]) -> [B, *L]`, for a sampler.

        Args:
            conditioning: one row a sample.
            transformer: another one that computes as the trained transformer does; None for that one.
        """
        chosen = self.weights.transformer if transformer is None else transformer

        def velocity(latents: Tensor, timesteps: Tensor) -> Tensor:
            with self.scorer.autocast():
                return self.family.velocity(chosen, latents, timesteps, conditioning, self.guidance)

        return velocity
