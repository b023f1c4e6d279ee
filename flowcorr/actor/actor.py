"""The diffusion actor: the trained policy, which scores SDE steps and learns from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowcorr.actor.scoring import Scorer
from flowcorr.actor.update import PolicyOptimizer
from flowcorr.actor.weights import TrainedWeights
from flowcorr.config.schema import Config
from flowcorr.models import Guidance, ModelFamily


class DiffusionActor:
    """The policy that is trained.

    Args:
        family: the loaded pipeline; its transformer gets the adapter.
        config: the run's configuration.

    Attributes:
        weights: the trained weights, with their average and their files.
        scorer: scores SDE steps under the weights.
        optimizer: learns the weights.
        score, log_probs: those of `Scorer`.
        update: that of `PolicyOptimizer`.
    """

    def __init__(self, family: ModelFamily, config: Config) -> None:
        self.family, self.config = family, config
        self.weights = TrainedWeights(family, config)
        if config.actor.gradient_checkpointing:
            self.weights.transformer.enable_gradient_checkpointing()
        self.scorer = Scorer(family, self.weights, config)
        self.optimizer = PolicyOptimizer(self.weights, self.scorer, config)
        self.score, self.log_probs = self.scorer.score, self.scorer.log_probs
        self.update = self.optimizer.update

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
