"""Measurements of the doctor: the engine's trajectories under known weights, and the actor's scores of them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError
from flowcorr.models import Conditioning, Guidance, SamplingPlan, windows_of
from flowcorr.questions.compared import Compared, velocity_gap
from flowcorr.records import Rollout
from flowcorr.rollout import RolloutEngine, Weights
from flowcorr.rollout.build import as_rollout
from flowcorr.rollout.precision import usual_gap

MOVE = 0.2  # of the velocity: above the 0.14 that int4 weights cost the embedded model, still near linear
_FIRST_TRY = 1e-2  # of an adapter's B, or relative to full weights, before it is scaled to `MOVE`
REFERENCES, NEGATIVE = "references", "negative_"  # beginnings of names of conditioning
TRAINING_STEP = 0  # seeds the noise; training steps count from 1
_OFF = 0.01  # of r^2: velocity gaps of samples of one batch differ by less than ten times
_LATEST_STEP = 100  # tried for windows that share a step with those of `TRAINING_STEP`


@runtime_checkable
class _Planned(Protocol):
    """An engine in this process, with a plan that can be changed."""

    plan: SamplingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How much of a fault is in a gap, by least squares over all latent elements.

    Attributes:
        factor: 1 if the engine has the fault as it was assumed, 0 if it has none of it.
        error: standard error of `factor`: the larger of two, by element and by sample. Rounding of a prompt's
            embedding, for one, moves all elements of a sample together.
        share: part of `r^2` that disappears with `factor` times the fault; never negative.
        by_rounding: the largest factor that rounding alone gives where the fault was computed in a pass of its own,
            whose rounding is in the gap, too. Guidance of scale `s` over two passes that round with variance `v`
            gives gap and fault a covariance of `(s - 1) (2s - 1) v`, and both stacks give the gap a variance of
            `2 (s^2 + (s - 1)^2) v`: twice as much or more. So it is half of `gap^2 / fault^2`.
    """

    factor: float
    error: float
    share: float
    by_rounding: float


class Trial(Compared):
    """One rollout with its step means and stds, and the actor's scores of it under the weights of the engine."""

    @property
    def engine_means(self) -> Tensor:
        assert self.rollout.window.means is not None, "`run_trials` refuses an engine that returns none"
        return self.rollout.window.means

    @property
    def engine_stds(self) -> Tensor:
        assert self.rollout.window.stds is not None, "`run_trials` refuses an engine that returns none"
        return self.rollout.window.stds

    @property
    def engine_noise(self) -> Tensor:
        """`[B, T, *L]`, the noise that the engine's own steps added, in units of their stds."""
        window = self.rollout.window
        step = sde.Transition(self.engine_means, self.engine_stds, window.step_sizes)
        return sde.added_noise(window.next_latents, step)

    def squared_distance(self, means: Tensor | None = None) -> Tensor:
        """`r^2` `[B, T]` between the engine's step means and the actor's, or other ones: twice the steps' exact KL."""
        return 2 * sde.step_kl(self.engine_means, self.means if means is None else means, self.stds)

    def velocity_gap(self, means: Tensor | None = None) -> float:
        """Root mean square difference of both velocities, as a share of the actor's."""
        return velocity_gap(self.engine_means, self.means if means is None else means, self.still)

    def explained_by(self, alternatives: Sequence[Tensor]) -> float:
        """Fraction of `r^2` that disappears with the closest alternative means; never negative.

        Args:
            alternatives: step means `[B, T, *L]`; each term may choose another one.
        """
        own = self.squared_distance().double()
        best = torch.stack([self.squared_distance(means).double() for means in alternatives]).amin(0)
        return max(0.0, float(1 - best.sum() / own.sum())) if own.any() else 0.0

    def fit(self, means: Tensor) -> Fit:
        """Fit the engine's step means to the line from the actor's (0) to `means` `[B, T, *L]` (1)."""
        gap = ((self.engine_means - self.means).double().flatten(2)) / self.stds.double()[..., None]
        fault = ((means - self.means).double().flatten(2)) / self.stds.double()[..., None]
        size = fault.square().sum().clamp(min=1e-30)
        factor = (gap * fault).sum() / size
        rest = gap - factor * fault
        correlated = rest * fault
        by_element, by_sample = correlated.square().sum(), correlated.sum((1, 2)).square().sum()
        error = torch.maximum(by_element, by_sample).sqrt() / size
        whole = gap.square().sum()
        share = (1 - rest.square().sum() / whole).clamp(min=0) if whole else whole  # no gap has no share
        by_rounding = whole / (2 * size)
        return Fit(
            factor=float(factor), error=float(error), share=float(share), by_rounding=float(by_rounding)
        )

    def samples_off(self) -> list[int]:
        """Places of the samples with a gap, as opposed to none: their `r^2` is at least `_OFF` of the largest."""
        gaps = self.squared_distance().sum(1)
        return (gaps >= _OFF * gaps.max()).nonzero().flatten().tolist()

    def select(self, rows: Tensor) -> Trial:
        """The samples at `rows` alone."""
        return replace(self, rollout=self.rollout.select(rows), given_scores=self.scores.select(rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trials:
    """All trials.

    Attributes:
        base: under the weights as they are.
        again: the same once more.
        alone: the last prompt of `base` in a batch of its own.
        bare: without the adapter (B = 0); `base` where its B is 0 anyway, and where all weights are trained.
        bare_weights: those of `bare`.
        moved: under weights that were moved from those of `bare`, sent right after other such ones, and with the
            noise of a later training step.
        moved_version: the version of the weights that the engine was told to use for `moved`.
        moved_under: `moved.rollout` scored under the older weights `bare`, `current` and `previous`.
        conditioning: the actor's own, a row a sample.
        num_prompts: prompts in `base`.
        withheld: `base` once more without the conditioning whose names begin so, on both sides: without reference
            images, and without guidance. Empty where precision explains the gap of `base`, or where the engine cannot.
        images_per_second: of sampling `again`, when the engine had warmed up.
    """

    base: Trial
    again: Rollout
    alone: Rollout
    bare: Trial
    bare_weights: Weights
    moved: Trial
    moved_version: int
    moved_under: Mapping[str, Tensor]
    conditioning: Conditioning
    num_prompts: int
    withheld: Mapping[str, Trial]
    images_per_second: float


def run_trials(actor: DiffusionActor, engine: RolloutEngine, conditioning: Conditioning) -> Trials:
    """Sample and score under several weights, then restore the weights of actor and engine.

    Args:
        actor: trains.
        engine: samples.
        conditioning: one row a prompt.

    Raises:
        BackendError: the engine returns no step means.
    """
    count = len(next(iter(conditioning.values())))
    current, history = actor.weights.snapshot(), list(engine.history)

    def tell(weights: Weights) -> None:
        actor.weights.load(weights.tensors)
        for _ in range(actor.config.rollout.max_weight_age + 1):  # until a stale engine has arrived at them
            engine.sync(weights)

    def draw(
        groups: Sequence[int], training_step: int = TRAINING_STEP, leave_out: str | None = None
    ) -> Rollout:
        asked = conditioning if leave_out is None else without(conditioning, leave_out)
        rows = {name: tensor[list(groups)] for name, tensor in asked.items()}
        rollout = as_rollout(engine.sample(rows, groups, training_step=training_step, with_means=True))
        if rollout.window.means is None or rollout.window.stds is None:
            raise BackendError(
                "the rollout engine returns no Window.means or no Window.stds, which the doctor compares"
            )
        members = torch.arange(rollout.num_samples) % actor.config.rollout.n
        return replace(rollout, members=members).to(actor.device)

    def trial(weights: Weights, training_step: int = TRAINING_STEP) -> Trial:
        tell(weights)
        return score_trial(actor, draw(range(count), training_step), training_step)

    def withheld(base: Trial) -> Iterator[tuple[str, Trial]]:
        if base.velocity_gap() <= usual_gap(actor.config, actor.family.amplification(actor.guidance)):
            return
        with contextlib.suppress(BackendError, KeyError):  # an engine may demand them
            if REFERENCES in conditioning:
                yield REFERENCES, score_trial(actor, draw(range(count), leave_out=REFERENCES))
        if not any(name.startswith(NEGATIVE) for name in conditioning):
            return
        with contextlib.suppress(BackendError, KeyError), _without_guidance(engine) as unguided:
            rollout = draw(range(count), leave_out=None if unguided else NEGATIVE)
            positive = without(rollout.conditioning, NEGATIVE)  # under which the actor takes no guidance
            yield NEGATIVE, score_trial(actor, replace(rollout, conditioning=positive))

    try:
        base = trial(current)
        begin = time.perf_counter()
        again = draw(range(count))
        seconds = time.perf_counter() - begin
        alone = draw([count - 1])
        less = dict(withheld(base))
        plain = _without_adapter(current)
        bare = base if plain is current else trial(plain)
        scale = _move_scale(actor, bare, plain)
        previous, newest = (_moved(plain, seed, scale, version=current.version + seed) for seed in (1, 2))
        tell(previous)
        later_step = _later_step(actor.config, count)
        moved = trial(newest, later_step)
        moved_under = {}
        for name, weights in (("bare", plain), ("current", current), ("previous", previous)):
            actor.weights.load(weights.tensors)
            moved_under[name] = score_means(actor, moved.rollout)
    finally:
        actor.weights.load(current.tensors)
        if history:
            engine.restore(history)
        else:
            engine.sync(current)
    members = base.rollout.num_samples // count
    return Trials(
        base=base,
        again=again,
        alone=alone,
        bare=bare,
        bare_weights=plain,
        moved=moved,
        moved_version=newest.version,
        moved_under=moved_under,
        conditioning={name: rows.repeat_interleave(members, 0) for name, rows in conditioning.items()},
        num_prompts=count,
        withheld=less,
        images_per_second=again.num_samples / seconds,
    )


@contextlib.contextmanager
def _without_guidance(engine: RolloutEngine) -> Iterator[bool]:
    """Turn guidance off in the engine's plan; yields false if the engine runs in another process."""
    if not isinstance(engine, _Planned):
        yield False
        return
    plan = engine.plan
    off: dict[str, Any] = {"guidance_scale": 1.0, "true_cfg_scale": 1.0}
    engine.plan = replace(
        plan, sampling=replace(plan.sampling, **off), guidance=replace(plan.guidance, **off)
    )
    try:
        yield True
    finally:
        engine.plan = plan


def without(conditioning: Mapping[str, Tensor], prefix: str) -> Conditioning:
    """Conditioning without the tensors whose names begin so."""
    return {name: rows for name, rows in conditioning.items() if not name.startswith(prefix)}


def score_trial(actor: DiffusionActor, rollout: Rollout, training_step: int = TRAINING_STEP) -> Trial:
    """The actor's scores of `rollout` under its present weights."""
    scores = actor.log_probs(rollout, with_means=True)
    return Trial(rollout=rollout, actor=actor, training_step=training_step, given_scores=scores)


def score_means(actor: DiffusionActor, rollout: Rollout, *, guidance: Guidance | None = None) -> Tensor:
    """The actor's step means `[B, T, *L]` under its present weights; `guidance` None takes that of the run."""
    means = actor.log_probs(rollout, with_means=True, guidance=guidance).means
    assert means is not None
    return means


def asked_windows(config: Config, num_prompts: int, training_step: int) -> Tensor:
    """SDE steps `[B, T]` of the images of the first `num_prompts` groups, drawn from the seeds."""
    groups = [group for group in range(num_prompts) for _ in range(config.rollout.n)]
    members = list(range(config.rollout.n)) * num_prompts
    seeds = {"seed": config.trainer.seed, "training_step": training_step}
    return windows_of(config.sampling, groups, members, **seeds)


def _later_step(config: Config, num_prompts: int) -> int:
    """A training step with a window that shares a step of the schedule with that of the same sample before.

    The noise of two training steps may be one by step of the schedule, which windows that share none do not show.
    """
    first = asked_windows(config, num_prompts, TRAINING_STEP)[:, None]
    later = range(TRAINING_STEP + 1, _LATEST_STEP)
    windows = ((step, asked_windows(config, num_prompts, step)) for step in later)
    shared = (step for step, window in windows if bool((window[:, :, None] == first).any()))
    return next(shared, _LATEST_STEP)


def _without_adapter(weights: Weights) -> Weights:
    """The weights with every adapter's B at 0; the same object if nothing changes."""
    ups = [name for name in weights.tensors if _is_up(name)]
    if not any(bool(weights.tensors[name].any()) for name in ups):
        return weights
    zeros = {name: torch.zeros_like(weights.tensors[name]) for name in ups}
    # A version of its own, as an engine may take one that it knows for one that it has.
    return Weights(version=weights.version + 3, tensors={**weights.tensors, **zeros})


def _move_scale(actor: DiffusionActor, bare: Trial, plain: Weights) -> float:
    """The scale at which random moves change the velocity by `MOVE`, as if it were linear in them."""
    actor.weights.load(_moved(plain, 2, _FIRST_TRY, version=0).tensors)
    change = velocity_gap(score_means(actor, bare.rollout), bare.means, bare.still)
    return _FIRST_TRY * MOVE / change if math.isfinite(change) and change > 0 else _FIRST_TRY


def _moved(weights: Weights, seed: int, scale: float, *, version: int) -> Weights:
    """Random moves: of each adapter's B by `scale`, else of all tensors by `scale` of their size."""
    generator = torch.Generator().manual_seed(seed)
    adapter = any(_is_up(name) for name in weights.tensors)
    tensors = dict(weights.tensors)
    for name, tensor in weights.tensors.items():
        if adapter and not _is_up(name):
            continue
        size = 1.0 if adapter else tensor.float().square().mean().sqrt().item()
        noise = torch.randn(tensor.shape, generator=generator)
        tensors[name] = tensor + (scale * size * noise).to(tensor.device, tensor.dtype)
    return Weights(version=version, tensors=tensors)


def _is_up(name: str) -> bool:
    return ".lora_B." in name
