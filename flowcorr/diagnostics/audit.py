"""How large is the gap between rollout engine and actor, and what would each correction make of it?

A few rollout batches are sampled with the configured engine and scored again by the actor, as decoupled mode
does. Then a training step is made on random advantages, for its time alone. A stale engine differs from the actor only
once something was learned, so there `rollout.staleness` such steps come first, before its batches are taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowcorr.actor import DiffusionActor, Scores
from flowcorr.algorithm.apply import correct
from flowcorr.config.schema import Config
from flowcorr.correction import (
    PRESETS,
    RolloutCorrectionConfig,
    compute_rollout_correction_and_rejection_mask,
)
from flowcorr.correction.ratios import SCALES, scale_factor
from flowcorr.correction.robust import OUTLIER_Z, outlier_band
from flowcorr.data import PromptStream, load_prompts
from flowcorr.diagnostics.audit_advice import Advice, Facts, advise, clip_limit, clip_needed, limit_at
from flowcorr.diagnostics.report import QUANTILES, ratio_distance
from flowcorr.diagnostics.trials import r_squared
from flowcorr.errors import BackendError, ConfigError
from flowcorr.losses import clip_by_term
from flowcorr.models import DTYPES, load_family
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.records import ActorBatch, Rollout
from flowcorr.rollout import RolloutEngine, Weights
from flowcorr.trainer.drift import behaviour_scores
from flowcorr.trainer.setup import build_engine, choose_device

NUM_BATCHES = 2

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGap:
    """The gap at one step of the schedule.

    Attributes:
        step_index: place in the schedule.
        sigma: noise level before the step.
        num_terms: terms measured.
        mean_delta: mean of `delta log p`, nats per latent element: how far the ratios of bypass start off-centre.
        abs_delta: the `QUANTILES` of `|delta log p|`.
        exact_kl: mean exact KL, nats per latent element.
        outside_clip: share of terms whose ratio, as the loss uses it, is outside its limit; None without a limit.
        clip_needed: clip range that bypass needs here.
    """

    step_index: int
    sigma: float
    num_terms: int
    mean_delta: float
    abs_delta: tuple[float, ...]
    exact_kl: float
    outside_clip: float | None
    clip_needed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWorth:
    """What importance weights without a cap would be worth.

    Attributes:
        scale: of the log-ratios, `mean`, `sqrt` or `sum`.
        level: `token` or `sequence`.
        ess: effective sample size of the measured weights, a share; too high where few samples were measured.
        chi2: their mean square less 1; None where it overflows.
        expected_ess: the share that the exact KLs of the measured terms imply for many samples like them.
    """

    scale: str
    level: str
    ess: float
    chi2: float | None
    expected_ess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetOutcome:
    """What a preset does to the measured batches, at its own thresholds.

    Attributes:
        name: the preset's.
        aliases: its other names.
        rejected_terms, rejected_samples: shares; a sample counts if one of its terms is rejected.
        mean_weight, ess: of the weights that multiply the loss; None where none do.
    """

    name: str
    aliases: tuple[str, ...]
    rejected_terms: float
    rejected_samples: float
    mean_weight: float | None
    ess: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one batch, of the fastest that was measured, so that warming up does not count.

    Attributes:
        rollout: sampling and decoding.
        recompute: scoring again with the actor, which bypass saves.
        update: learning from it.
    """

    rollout: float
    recompute: float
    update: float

    @property
    def share(self) -> float:
        """The recompute pass as a share of the step; the reward's time is in no part of it."""
        return self.recompute / (self.rollout + self.recompute + self.update)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """All that was measured, and what follows.

    Attributes:
        advice: the recommendation.
        num_samples: `B`, over all batches.
        num_steps: `T`, SDE steps of the window.
        num_elements: `D`.
        loss_mode: the configured loss.
        clip_limit: how far its ratio may be from 1, at all steps or by step index; None where it has no such limit.
        staleness: training steps that the engine lags behind.
        joint_nats: mean over samples of the exact KL of the whole window, `D` times its sum over steps.
        precision_nats: the same of the engine alone: under the weights that sampled, in the training stack.
        stale_nats: the same of staleness alone: from those weights to the actor's, both in the training stack.
        outside_clip: share of terms outside the limit, over all steps.
        outliers: share of terms that `step_z` would reject.
        outlier_band: largest distance of a ratio from 1 that is no outlier at any step.
        cost: of the recompute pass.
        steps: by step index.
        scales: by scale and level.
        presets: by preset.
    """

    advice: Advice
    num_samples: int
    num_steps: int
    num_elements: int
    loss_mode: str
    clip_limit: float | Sequence[float] | None
    staleness: int
    joint_nats: float
    precision_nats: float
    stale_nats: float
    outside_clip: float | None
    outliers: float
    outlier_band: float
    cost: Cost
    steps: Sequence[StepGap]
    scales: Sequence[ScaleWorth]
    presets: Sequence[PresetOutcome]

    def to_mapping(self) -> dict[str, Any]:
        """Plain, finite values for JSON."""
        mapping = asdict(self)
        mapping["cost"]["share"] = self.cost.share
        return mapping


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap:
    """What the actor makes of a rollout, `[B, T]` each.

    Attributes:
        log_probs: the actor's, nats per latent element.
        rollout_log_probs: the engine's.
        step_kl: exact KL of each step a latent element, float64.
        stds: full standard deviations of the steps.
        sigmas, step_indices: noise levels before the steps, and their places in the schedule.
    """

    log_probs: Tensor
    rollout_log_probs: Tensor
    step_kl: Tensor
    stds: Tensor
    sigmas: Tensor
    step_indices: Tensor

    @property
    def delta(self) -> Tensor:
        """Actor less rollout, float64."""
        return self.log_probs.double() - self.rollout_log_probs.double()

    def joint_nats(self, num_elements: int) -> float:
        """Mean over samples of the exact KL of the window, by the chain rule."""
        return num_elements * float(self.step_kl.sum(1).mean())

    @staticmethod
    def concatenate(parts: Sequence[Gap]) -> Gap:
        """The samples of all parts."""
        names = [entry.name for entry in fields(Gap)]
        return Gap(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def audit(config: Config, *, num_batches: int = NUM_BATCHES) -> AuditReport:
    """Build the actor and the engine of a configuration, and audit them on its first training prompts.

    Args:
        config: the run's configuration; nothing is rewarded, so its reward is not even built.
        num_batches: rollout batches, each of `rollout.prompts_per_step * rollout.n` images.

    Raises:
        ConfigError: `num_batches` is below 1, or something in `config` cannot work.
        BackendError: the engine returns no step means, or a log-prob is not finite.
    """
    if num_batches < 1:
        raise ConfigError(f"--batches {num_batches} measures nothing; use 1 or more")
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    data = load_prompts(
        config.data.path,
        heldout_fraction=config.data.heldout_fraction,
        num_train=config.data.num_train,
        num_heldout=config.data.num_heldout,
        seed=0,
    )
    family = load_family(
        config.model.path,
        family=config.model.family,
        dtype=DTYPES[config.model.dtype],
        device=choose_device(config.trainer.device),
        max_sequence_length=config.model.max_sequence_length,
    )
    # The steps that make an engine stale are to move the weights as far as those of a run that is under way.
    actor = DiffusionActor(family, replace(config, actor=replace(config.actor, warmup_steps=0)))
    engine = build_engine(config, actor)
    stream = PromptStream(data.train, seed=config.trainer.seed)
    texts = [
        [prompt.text for prompt in stream.next(config.rollout.prompts_per_step)]
        for _ in range(config.rollout.lag + num_batches)
    ]
    cache = PromptCache(family, actor.guidance, [text for batch in texts for text in batch])
    try:
        engine.sync(actor.snapshot())
        return examine_batches(actor, engine, cache, texts)
    finally:
        engine.close()


def examine_batches(
    actor: DiffusionActor, engine: RolloutEngine, cache: PromptCache, texts: Sequence[Sequence[str]]
) -> AuditReport:
    """Audit an actor and its engine; the first `rollout.staleness` batches of `texts` make the engine stale.

    Raises:
        BackendError: the engine returns no step means, or a log-prob is not finite.
    """
    config, seconds = actor.config, _Seconds(actor.device)
    staleness = config.rollout.lag
    gaps, engines, stales, num_elements = [], [], [], 0
    for step, batch in enumerate(texts):
        sample = partial(
            engine.sample, cache(batch), range(len(batch)), training_step=step + 1, with_means=True
        )
        rollout = seconds.timed("rollout", sample).to(actor.device)
        num_elements = rollout.num_elements
        gap = seconds.timed("recompute", partial(score, actor, rollout))
        learn = partial(_learn_anything, actor, rollout, gap, training_step=step + 1)
        if step < staleness:
            seconds.timed("update", learn)
            engine.sync(actor.snapshot())
            continue
        gaps.append(gap)
        if staleness:
            of_engine, of_staleness = split(actor, rollout, engine.history)
            engines.append(of_engine)
            stales.append(of_staleness)
    whole = Gap.concatenate(gaps)
    precision = Gap.concatenate(engines or gaps).joint_nats(num_elements)
    stale = Gap.concatenate(stales).joint_nats(num_elements) if stales else 0.0
    for _ in range(staleness, 2):  # of which the first may have warmed up
        seconds.timed("update", learn)
    phases = ("rollout", "recompute", "update")
    cost = Cost(**{phase: seconds.fastest(phase) for phase in phases})
    return _report(config, whole, num_elements, precision, stale, cost)


def score(actor: DiffusionActor, rollout: Rollout) -> Gap:
    """The actor's view of a rollout.

    Raises:
        BackendError: the rollout has no step means, or a log-prob is not finite.
    """
    if rollout.means is None or rollout.stds is None:
        raise BackendError("the rollout engine returns no step means, from which the audit has the exact KL")
    return _gap(actor.log_probs(rollout, with_means=True), rollout)


def split(actor: DiffusionActor, rollout: Rollout, history: Sequence[Weights]) -> tuple[Gap, Gap]:
    """The parts of the gap that are the engine's and that are of older weights, see `trainer.drift`."""
    behaviour = behaviour_scores(actor, rollout, history, with_means=True)
    as_scored = replace(rollout, log_probs=behaviour.log_probs, means=behaviour.means)
    return _gap(behaviour, rollout), score(actor, as_scored)


def _gap(scores: Scores, rollout: Rollout) -> Gap:
    assert scores.means is not None
    assert rollout.means is not None
    assert rollout.stds is not None
    if not (scores.log_probs.isfinite() & rollout.log_probs.isfinite()).all():
        raise BackendError(
            "log-probs of the rollout engine or the actor are not finite; flowcorr doctor tells which part is to blame"
        )
    return Gap(
        log_probs=scores.log_probs.cpu(),
        rollout_log_probs=rollout.log_probs.cpu(),
        step_kl=r_squared(rollout.means, scores.means, rollout.stds).double().cpu() / 2,
        stds=rollout.stds.cpu(),
        sigmas=rollout.sigmas.cpu(),
        step_indices=rollout.step_indices.cpu(),
    )


class _Seconds:
    """The time that phases take; a device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: dict[str, list[float]] = {}

    def timed(self, phase: str, work: Callable[[], Result]) -> Result:
        begin = time.perf_counter()
        result = work()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seen.setdefault(phase, []).append(time.perf_counter() - begin)
        return result

    def fastest(self, phase: str) -> float:
        return min(self._seen[phase])


def _learn_anything(actor: DiffusionActor, rollout: Rollout, gap: Gap, *, training_step: int) -> None:
    """One training step on random advantages: it moves the weights about as far as one that learns."""
    draw = torch.Generator().manual_seed(training_step)
    advantages = torch.randn(rollout.num_samples, generator=draw).to(actor.device)
    batch = ActorBatch(
        rollout=replace(rollout, images=None),
        advantages=advantages,
        old_log_probs=gap.log_probs.to(actor.device),
        old_means=rollout.means,
    )
    actor.update(batch, training_step=training_step)


def _report(
    config: Config, gap: Gap, num_elements: int, precision: float, stale: float, cost: Cost
) -> AuditReport:
    limit = clip_limit(config.actor)
    distance = ratio_distance(gap.delta, gap.step_kl, gap.stds, gap.step_indices, config.actor)
    steps = _steps(gap, distance, limit)
    needed = {step.step_index: step.clip_needed for step in steps}
    if config.actor.ratio_level != "step":  # the window has one ratio
        needed = dict.fromkeys(needed, max(needed.values()))
    joint = gap.joint_nats(num_elements)
    outliers, band = _outliers(gap, num_elements)
    scales = _scales(gap, num_elements)
    facts = Facts(
        num_steps=gap.delta.shape[1],
        num_elements=num_elements,
        joint_nats=joint,
        exact_ess=next(row.expected_ess for row in scales if (row.scale, row.level) == ("sum", "sequence")),
        stale_nats=stale,
        clip_limit=limit,
        clip_by_step=needed,
        window_end=config.sampling.sde_window_range[1],
        loss_mode=config.actor.loss_mode,
        ratio_level=config.actor.ratio_level,
        unscaled=config.sampling.cps_unscaled,
        outliers=outliers,
        outlier_band=band,
        recompute_share=cost.share,
    )
    return AuditReport(
        advice=advise(facts),
        num_samples=len(gap.delta),
        num_steps=facts.num_steps,
        num_elements=num_elements,
        loss_mode=config.actor.loss_mode,
        clip_limit=limit,
        staleness=config.rollout.lag,
        joint_nats=joint,
        precision_nats=precision,
        stale_nats=stale,
        outside_clip=None if limit is None else _share(distance > clip_by_term(limit, gap.step_indices)),
        outliers=outliers,
        outlier_band=band,
        cost=cost,
        steps=steps,
        scales=scales,
        presets=_presets(gap, num_elements, config.sampling.num_inference_steps),
    )


def _steps(gap: Gap, distance: Tensor, limit: float | Sequence[float] | None) -> list[StepGap]:
    delta, steps = gap.delta, []
    for index in gap.step_indices.unique().tolist():
        here = gap.step_indices == index
        quantiles = torch.quantile(delta[here].abs(), delta.new_tensor(QUANTILES)).tolist()
        limit_here = None if limit is None else limit_at(limit, index)
        steps.append(
            StepGap(
                step_index=index,
                sigma=float(gap.sigmas[here][0]),
                num_terms=int(here.sum()),
                mean_delta=float(delta[here].mean()),
                abs_delta=tuple(quantiles),
                exact_kl=float(gap.step_kl[here].mean()),
                outside_clip=None if limit_here is None else _share(distance[here] > limit_here),
                clip_needed=clip_needed(distance[here]),
            )
        )
    return steps


def _scales(gap: Gap, num_elements: int) -> list[ScaleWorth]:
    """Weights without a cap at every scale, by the definitions of ESS and chi-squared.

    With `R` the sum of `r^2` over the steps that a weight is of, its `delta` is normal with mean `-R / 2` and variance
    `R / D`, so that `exp(c delta)` has the moments `exp(-c R / 2 + c^2 R / (2 D))` and `exp(-c R + 2 c^2 R / D)`. Terms
    differ in `R`, by their steps of the schedule above all, so the expected share is of the mixture of them. At scale
    `sum` it is `1 / mean(exp(R D))`, which a few large gaps make far smaller than their mean would.
    """
    worth = []
    levels = {
        "token": (gap.delta.flatten(), 2 * gap.step_kl.flatten()),
        "sequence": (gap.delta.sum(1), 2 * gap.step_kl.sum(1)),
    }
    for scale in SCALES:
        factor = scale_factor(scale, num_elements)
        for level, (log_ratio, squared) in levels.items():
            scaled, spread = factor * log_ratio, factor**2 * squared / num_elements
            first, second = _log_mean_exp(scaled), _log_mean_exp(2 * scaled)
            drift = factor * squared
            expected = 2 * _log_mean_exp((spread - drift) / 2) - _log_mean_exp(2 * spread - drift)
            worth.append(
                ScaleWorth(
                    scale=scale,
                    level=level,
                    ess=math.exp(2 * first - second),
                    chi2=math.expm1(second) if second < 700 else None,
                    expected_ess=math.exp(expected),
                )
            )
    return worth


def _log_mean_exp(values: Tensor) -> float:
    return float(values.logsumexp(0)) - math.log(len(values))


def _presets(gap: Gap, num_elements: int, num_steps: int) -> list[PresetOutcome]:
    outcomes = []
    for name, description in PRESETS.items():
        if description.startswith("= "):
            continue
        config = RolloutCorrectionConfig.from_preset(name)
        # In bypass, scope step, every term is a trajectory of its own.
        shape = (-1, 1) if config.bypass_mode and config.bypass_scope == "step" else gap.log_probs.shape
        correction = correct(
            gap.log_probs.reshape(shape),
            gap.rollout_log_probs.reshape(shape),
            config,
            mask=None,
            step_index=gap.step_indices.reshape(shape),
            num_elements=num_elements,
            num_steps=num_steps,
        )
        weights, kept = correction.weights, correction.keep.reshape(gap.log_probs.shape)
        outcomes.append(
            PresetOutcome(
                name=name,
                aliases=tuple(alias for alias, text in PRESETS.items() if text == f"= {name}"),
                rejected_terms=_share(~kept),
                rejected_samples=_share(~kept.all(1)),
                mean_weight=None if weights is None else float(weights.double().mean()),
                ess=None if weights is None else _effective_share(weights.double()),
            )
        )
    return outcomes


def _effective_share(weights: Tensor) -> float:
    squares = float(weights.square().mean())
    return float(weights.mean()) ** 2 / squares if squares else 0.0


def _outliers(gap: Gap, num_elements: int) -> tuple[float, float]:
    """The share of terms that `step_z` rejects, and the largest `|ratio - 1|` that is no outlier at any step."""
    keep = compute_rollout_correction_and_rejection_mask(
        gap.log_probs,
        gap.rollout_log_probs,
        rollout_rs="step_z",
        rollout_rs_threshold=OUTLIER_Z,
        step_indices=gap.step_indices,
        num_elements=num_elements,
    ).keep
    everywhere, num_steps = torch.ones_like(gap.delta), int(gap.step_indices.max()) + 1
    low, high = outlier_band(gap.delta, everywhere, gap.step_indices, num_steps, floor=0.01 / num_elements)
    return _share(~keep), math.expm1(max(-float(low), float(high)))


def _share(where: Tensor) -> float:
    return float(where.double().mean())
