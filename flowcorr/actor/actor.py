"""The diffusion actor: the trained policy, which scores SDE steps and learns from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flowcorr.actor.scoring import Scorer, Scores
from flowcorr.actor.update import PolicyOptimizer
from flowcorr.actor.weights import TrainedWeights
from flowcorr.config.schema import Config
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.metrics import Metrics
from flowcorr.models import Guidance, ModelFamily
from flowcorr.records import ActorBatch, PolicyStep, Rollout


class DiffusionActor:
    """The policy that is trained.

    Args:
        family: the loaded pipeline; its transformer gets the adapter.
        config: the run's configuration.

    Attributes:
        weights: the trained weights, with their average and their files.
        scorer: scores SDE steps under the weights.
        optimizer: learns the weights.
        guidance: of the run's sampling, which is part of the policy.
    """

    def __init__(self, family: ModelFamily, config: Config) -> None:
        self.family, self.config = family, config
        sampling = config.sampling
        self.guidance = Guidance(
            guidance_scale=sampling.guidance_scale,
            true_cfg_scale=sampling.true_cfg_scale,
            negative_prompt=sampling.negative_prompt,
        )
        self.weights = TrainedWeights(family, config)
        if config.actor.gradient_checkpointing:
            self.weights.transformer.enable_gradient_checkpointing()
        self.scorer = Scorer(family, self.weights, self.guidance, config)
        self.optimizer = PolicyOptimizer(self.weights, self.scorer, config)

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def velocity(self, conditioning: Mapping[str, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """The policy's velocity under `conditioning`, `(latents [B, *L], timesteps [B]) -> [B, *L]`, for a sampler."""

        def velocity(latents: Tensor, timesteps: Tensor) -> Tensor:
            return self.family.velocity(
                self.weights.transformer, latents, timesteps, conditioning, self.guidance
            )

        return velocity

    def score(self, rollout: Rollout) -> PolicyStep:
        """See `Scorer.score`."""
        return self.scorer.score(rollout)

    def log_probs(
        self,
        rollout: Rollout,
        *,
        with_means: bool = False,
        guidance: Guidance | None = None,
        filler_sample: Rollout | None = None,
    ) -> Scores:
        """See `Scorer.log_probs`."""
        return self.scorer.log_probs(
            rollout, with_means=with_means, guidance=guidance, filler_sample=filler_sample
        )

    def update(
        self,
        batch: ActorBatch,
        correction: RolloutCorrectionConfig | None,
        *,
        training_step: int,
        record: Callable[[ActorBatch, PolicyStep], None] | None = None,
    ) -> Metrics:
        """See `PolicyOptimizer.update`."""
        return self.optimizer.update(batch, correction, training_step=training_step, record=record)
