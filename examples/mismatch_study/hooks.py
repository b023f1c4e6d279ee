"""What no recipe says: wrong prompts, exchanged images, a faulty worker, an unquantized engine, and controls.

Each wraps a part of the training step and is put in its place; nothing of flowcorr is patched.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.actor import DiffusionActor
from flowcorr.actor.update import Update
from flowcorr.actor.weights import TrainedWeights
from flowcorr.config.schema import Config
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.records import ActorBatch, Rollout
from flowcorr.rollout import InProcessEngine, OnImages, RolloutEngine, Weights, ignore_images
from flowcorr.rollout.build import build_backend
from flowcorr.trainer.setup import load_model


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
        """See `RolloutEngine.sample`."""
        settings = {"training_step": training_step, "with_means": with_means}
        right = self.engine.sample(conditioning, groups, **settings)
        sample = partial(self.engine.sample, groups=groups, **settings)
        rollout = self.spoiled(right, self.is_wrong(right.num_samples, training_step), conditioning, sample)
        on_images(rollout.decoded)
        return rollout

    def spoiled(
        self,
        right: Rollout,
        is_wrong: Tensor,
        conditioning: Mapping[str, Tensor],
        sample: Callable[[Mapping[str, Tensor]], Rollout],
    ) -> Rollout:
        """The rollout with its wrong samples; twice the work, which no measurement of time may count."""
        shifted = {name: rows.roll(1, 0) for name, rows in conditioning.items()}
        return mixed(right, sample(shifted), is_wrong)

    def is_wrong(self, num_samples: int, training_step: int) -> Tensor:
        """`[B]` bool, the samples of this step that belong to another prompt."""
        draw = sde.generator(self.seed, training_step, 0, 0, stream="wrong prompts")
        return torch.rand(num_samples, generator=draw) < self.share

    def close(self) -> None:
        self.engine.close()


class ExchangedImages(WrongPrompts):
    """An engine that exchanges the images of a share of the samples within their group, and does not say so.

    The reward of such a sample is that of another one of its prompt; trajectories and log-probs are right.
    """

    def spoiled(
        self,
        right: Rollout,
        is_wrong: Tensor,
        conditioning: Mapping[str, Tensor],
        sample: Callable[[Mapping[str, Tensor]], Rollout],
    ) -> Rollout:
        """The rollout with its exchanged images."""
        return replace(right, images=right.decoded[exchanged(right.group_ids, is_wrong)])


class OneOfFour:
    """An engine of four workers, the last of which has a fault; a worker samples every fourth group.

    Args:
        engine: in process, sharing the actor's transformer.
        weights: the actor's.
        fault: `quarter_adapter`: the faulty worker samples with half the adapter. `quarter_sigma`: it takes one sigma,
            that of step 1, 3 % too low, and returns the right one.
    """

    def __init__(self, engine: InProcessEngine, weights: TrainedWeights, fault: str) -> None:
        self.engine, self.weights, self.fault = engine, weights, fault

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
        with self._faulty():
            wrong = self.engine.sample(conditioning, groups, **settings)
        window = replace(wrong.window, **{name: getattr(right.window, name) for name in _SCHEDULE})
        rollout = mixed(right, replace(wrong, window=window), right.group_ids % 4 == 3)
        on_images(rollout.decoded)
        return rollout

    @contextmanager
    def _faulty(self) -> Iterator[None]:
        plan, adapters = self.engine.plan, []
        if self.fault == "quarter_sigma":
            sigmas = list(plan.schedule.sigmas)
            sigmas[1] *= 0.97
            self.engine.plan = replace(plan, schedule=replace(plan.schedule, sigmas=tuple(sigmas)))
        else:
            adapters = [value for name, value in self.weights.parameters.items() if "lora_B" in name]
        try:
            with torch.no_grad():
                torch._foreach_mul_(adapters, 0.5) if adapters else None
            yield
        finally:
            self.engine.plan = plan
            with torch.no_grad():
                torch._foreach_mul_(adapters, 2.0) if adapters else None

    def close(self) -> None:
        self.engine.close()


class UnquantizedEngine:
    """An engine in process on the base without `model.quantization`, with the trainer's adapter.

    Args:
        config: the run's.
        trained: the trainer's adapter.

    Attributes:
        actor: scores and evaluates as this engine samples, with the weights of the last `sync`.
    """

    def __init__(self, config: Config, trained: TrainedWeights) -> None:
        plain = replace(config, model=replace(config.model, quantization="none"))
        self.actor = DiffusionActor(load_model(plain), plain)
        self.trained = trained
        weights = self.actor.weights
        self.engine = build_backend(
            plain, self.actor.family, merge=weights.merged, base=weights.untrained, probe=None
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def sync(self, weights: Weights) -> None:
        self.actor.weights.load(self.trained.snapshot().tensors)
        self.engine.sync(weights)


_SCHEDULE = ("timesteps", "sigmas", "sigmas_next")


def exchanged(group_ids: Tensor, is_wrong: Tensor) -> Tensor:
    """`[B]`, the sample whose image each one has: the next wrong one of its group, in turn."""
    places = torch.arange(len(group_ids))
    for group in group_ids.unique():
        rows = places[(group_ids == group) & is_wrong]
        places = places.index_copy(0, rows, rows.roll(1))
    return places


def mixed(right: Rollout, wrong: Rollout, is_wrong: Tensor) -> Rollout:
    """`right` with the samples that `is_wrong` `[B]` marks taken from `wrong`, but for their conditioning."""
    rows = torch.arange(right.num_samples) + right.num_samples * is_wrong
    return replace(
        Rollout.concatenate([right, wrong]).select(rows),
        conditioning=right.conditioning,
        conditioning_rows=right.conditioning_rows,
    )


class RandomRejection:
    """An actor that leaves out a share of the terms, drawn at random: the control for rejection.

    Args:
        actor: learns from the others.
        share: of the terms.
        seed: which ones.
    """

    def __init__(self, actor: DiffusionActor, *, share: float, seed: int) -> None:
        self._actor, self._share, self._seed = actor, share, seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def update(
        self, batch: ActorBatch, correction: RolloutCorrectionConfig, *, training_step: int, **settings: Any
    ) -> Update:
        """See `DiffusionActor.update`."""
        draw = sde.generator(self._seed, training_step, 0, 0, stream="random rejection")
        keep = torch.rand(batch.rollout.log_probs.shape, generator=draw) >= self._share
        batch = replace(batch, keep=keep)
        return self._actor.update(batch, correction, training_step=training_step, **settings)


class StepMeanWeights:
    """An actor that replaces each importance weight by the batch's mean weight at the same step of the schedule.

    What it still gains over uncorrected training is a re-weighting of timesteps, and no off-policy correction.
    """

    def __init__(self, actor: DiffusionActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def update(self, batch: ActorBatch, correction: RolloutCorrectionConfig, **settings: Any) -> Update:
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
