"""The two things that no recipe says: samples of a wrong prompt, and the control for importance weights.

Both wrap a part of the training step and are put in its place; nothing of flowcorr is patched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.actor import DiffusionActor
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.metrics import Metrics
from flowcorr.records import ActorBatch, Rollout
from flowcorr.rollout import OnImages, RolloutEngine, Weights, ignore_images


class WrongPrompts:
    """An engine that now and then samples for the prompt of another group, and does not say so.

    Image, trajectory and log-probs of such a sample are those of the wrong prompt; its conditioning, with which the
    trainer scores it, is that of the right one. Noise and windows are what they would have been.

    Args:
        engine: samples the right and the wrong images.
        share: probability that a sample is wrong.
        seed: which samples are.
    """

    def __init__(self, engine: RolloutEngine, *, share: float, seed: int) -> None:
        self.engine, self.share, self.seed = engine, share, seed

    @property
    def history(self) -> Sequence[Weights]:
        return self.engine.history

    def restore(self, history: Sequence[Weights]) -> None:
        self.engine.restore(history)

    def sync(self, weights: Weights) -> None:
        self.engine.sync(weights)

    def sample(
        self,
        conditioning: Mapping[str, Tensor],
        groups: Sequence[int],
        *,
        training_step: int,
        with_means: bool,
        on_images: OnImages = ignore_images,
    ) -> Rollout:
        """See `RolloutEngine.sample`; twice the work, which no measurement of time may count."""
        settings = {"training_step": training_step, "with_means": with_means}
        right = self.engine.sample(conditioning, groups, **settings)
        shifted = {name: rows.roll(1, 0) for name, rows in conditioning.items()}
        wrong = self.engine.sample(shifted, groups, **settings)
        rollout = mixed(right, wrong, self.is_wrong(right.num_samples, training_step))
        on_images(rollout.decoded)
        return rollout

    def is_wrong(self, num_samples: int, training_step: int) -> Tensor:
        """`[B]` bool, the samples of this step that belong to another prompt."""
        draw = sde.generator(self.seed, training_step, 0, 0, stream="wrong prompts")
        return torch.rand(num_samples, generator=draw) < self.share

    def close(self) -> None:
        self.engine.close()


def mixed(right: Rollout, wrong: Rollout, is_wrong: Tensor) -> Rollout:
    """`right` with the samples that `is_wrong` `[B]` marks taken from `wrong`, but for their conditioning."""
    rows = torch.arange(right.num_samples) + right.num_samples * is_wrong
    return replace(
        Rollout.concatenate([right, wrong]).select(rows),
        conditioning=right.conditioning,
        conditioning_rows=right.conditioning_rows,
    )


class StepMeanWeights:
    """An actor that replaces each importance weight by the batch's mean weight at the same step of the schedule.

    What it still gains over uncorrected training is a re-weighting of timesteps, and no off-policy correction.
    """

    def __init__(self, actor: DiffusionActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def update(self, batch: ActorBatch, correction: RolloutCorrectionConfig, **settings: Any) -> Metrics:
        """See `DiffusionActor.update`."""
        assert batch.rollout_is_weights is not None, "the control needs weights to take the mean of"
        weights = step_means(batch.rollout_is_weights, batch.rollout.window.step_indices)
        return self._actor.update(replace(batch, rollout_is_weights=weights), correction, **settings)


def step_means(weights: Tensor, step_indices: Tensor) -> Tensor:
    """The mean of `weights` `[B, T]` over all terms with the same step index `[B, T]`, in each term's place."""
    places, index = step_indices.unique(return_inverse=True)
    sums = weights.new_zeros(len(places)).index_add(0, index.flatten(), weights.flatten())
    counts = torch.bincount(index.flatten(), minlength=len(places))
    return (sums / counts)[index]
