"""How large is the gap between rollout engine and actor, and what would each correction make of it?

A few rollout batches are sampled with the configured engine and scored again by the actor, as decoupled mode
does. Then a training step is made on random advantages, for its time alone. A stale engine differs from the actor only
once something was learned, so there `rollout.staleness` such steps come first, before its batches are taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from flowcorr.actor import DiffusionActor
from flowcorr.algorithm import AutoMode
from flowcorr.config.schema import Config, RolloutConfig
from flowcorr.data import PromptStream, load_prompts
from flowcorr.diagnostics.audit.advice import Advice, Facts, advise
from flowcorr.diagnostics.audit.gap import delta, joint_nats, measure_gap, split_gap
from flowcorr.diagnostics.audit.tables import (
    PresetOutcome,
    ScaleWorth,
    StepGap,
    fraction,
    gap_by_step,
    outliers,
    preset_outcomes,
    worth_of_weights,
)
from flowcorr.diagnostics.clip_noise import ratio_distance
from flowcorr.diagnostics.diagnosis import HIDING, Diagnosis
from flowcorr.diagnostics.dumped import UNBOUNDED
from flowcorr.errors import ConfigError
from flowcorr.losses import clip_by_term, resolve_loss
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.records import ActorBatch, Rollout, Terms
from flowcorr.rollout import RolloutEngine
from flowcorr.rollout.precision import trainer_quantization
from flowcorr.trainer.setup import build_stacks, load_model

NO_ADVICE = "no advice: the dump does not tell num_elements, without which a gap has no size"
NUM_BATCHES = 2
MAX_IMAGES = 96  # a batch: their steps give quantiles, and more take minutes with a large model

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one batch, of the fastest that was measured, so that warming up does not count.

    Attributes:
        rollout: sampling and decoding.
        recompute: scoring again with the actor, which bypass saves.
        update: learning from it.
        images: images of the batch.
    """

    rollout: float
    recompute: float
    update: float
    images: int

    @property
    def images_per_second(self) -> float:
        """Of the rollout alone."""
        return self.images / self.rollout

    @property
    def share(self) -> float:
        """The recompute pass as a share of the step; the reward's time is in no part of it."""
        return self.recompute / (self.rollout + self.recompute + self.update)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """All that was measured, and what follows.

    Attributes:
        advice: the recommendation; it, nats, outliers and scales are None or empty where `D` is not known.
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
        cost: of the recompute pass; None if it was not timed.
        steps: by step index.
        scales: by scale and level.
        presets: by preset.
        notes: of a dump, what it lacks and how that was made up for.
        diagnoses: of a dump, what is wrong with its log-probs, which comes before any correction.
        of_recipe: whether a recipe of flowcorr can take the advice; another trainer's owner gets it in words.
        ages_known: whether a dump tells how old the weights that sampled were.
    """

    advice: Advice | None
    num_samples: int
    num_steps: int
    num_elements: int | None
    loss_mode: str
    clip_limit: float | Sequence[float] | None
    staleness: int
    outside_clip: float | None
    cost: Cost | None
    steps: Sequence[StepGap]
    presets: Sequence[PresetOutcome]
    joint_nats: float | None = None
    precision_nats: float | None = None
    stale_nats: float | None = None
    outliers: float | None = None
    outlier_band: float | None = None
    scales: Sequence[ScaleWorth] = ()
    notes: tuple[str, ...] = ()
    diagnoses: tuple[Diagnosis, ...] = ()
    of_recipe: bool = True
    ages_known: bool = False

    @property
    def verdict(self) -> str:
        """The fault, or the advice on the gap, in a line."""
        if self.diagnoses:
            return self.diagnoses[0].verdict
        return NO_ADVICE if self.advice is None else self.advice.verdict

    @property
    def hidden(self) -> bool:
        """Whether what is wrong hides the gap, so that no advice on its correction can hold."""
        return any(diagnosis.cause in HIDING for diagnosis in self.diagnoses)

    @property
    def assumes_newest(self) -> bool:
        """Whether bypass is advised although nothing tells the age of the weights that sampled."""
        bypass = self.advice is not None and self.advice.mode == "bypass"
        return bypass and not self.of_recipe and not self.ages_known

    def to_mapping(self) -> dict[str, Any]:
        """Plain, finite values for JSON."""
        mapping = asdict(self)
        if self.cost is not None:
            mapping["cost"]["share"] = self.cost.share
        return mapping


def audit(config: Config, *, num_batches: int = NUM_BATCHES) -> AuditReport:
    """Build the actor and the engine of a configuration, and audit them on its first training prompts.

    Args:
        config: the run's configuration; nothing is rewarded, so its reward is not even built.
        num_batches: rollout batches, each of `rollout.prompts_per_step * rollout.n` images; if those are more than
            `MAX_IMAGES`, of fewer prompts.

    Raises:
        ConfigError: `num_batches` is below 1, or something in `config` cannot work.
        BackendError: the engine returns no step means, or a log-prob is not finite.
    """
    if num_batches < 1:
        raise ConfigError(f"--batches {num_batches} measures nothing; use 1 or more")
    # The steps that make an engine stale have to move the weights as far as those of a run after its warm-up.
    config = replace(config, actor=replace(config.actor, warmup_steps=0), rollout=_few_prompts(config))
    stream = PromptStream(load_prompts(config.data).train, seed=config.trainer.seed)
    texts = [
        [prompt.text for prompt in stream.next(config.rollout.prompts_per_step)]
        for _ in range(config.rollout.max_weight_age + num_batches)
    ]
    stacks = build_stacks(config, load_model(config), [text for batch in texts for text in batch])
    try:
        stacks.engine.sync(stacks.actor.weights.snapshot())
        return examine_batches(stacks.actor, stacks.engine, stacks.cache, texts)
    finally:
        stacks.engine.close()


def _few_prompts(config: Config) -> RolloutConfig:
    rollout = config.rollout
    enough = max(MAX_IMAGES // rollout.n, config.actor.mini_batches)
    return replace(rollout, prompts_per_step=min(rollout.prompts_per_step, enough))


def examine_batches(
    actor: DiffusionActor, engine: RolloutEngine, cache: PromptCache, texts: Sequence[Sequence[str]]
) -> AuditReport:
    """Audit an actor and its engine; the first `rollout.staleness` batches of `texts` make the engine stale.

    Raises:
        BackendError: the engine returns no step means, or a log-prob is not finite.
    """
    config, seconds = actor.config, _Seconds(actor.device)
    staleness = config.rollout.max_weight_age
    gaps, engines, stales, num_elements = [], [], [], 0
    for step, batch in enumerate(texts):
        sample = partial(
            engine.sample, cache(batch), range(len(batch)), training_step=step + 1, with_means=True
        )
        rollout = seconds.timed("rollout", sample).to(actor.device)
        num_elements = rollout.num_elements
        gap = seconds.timed("recompute", partial(measure_gap, actor, rollout))
        learn = partial(_learn_anything, actor, rollout, gap, training_step=step + 1)
        if step < staleness:
            seconds.timed("update", learn)
            engine.sync(actor.weights.snapshot())
            continue
        gaps.append(gap)
        if staleness:
            of_engine, of_staleness = split_gap(actor, rollout, engine.history)
            engines.append(of_engine)
            stales.append(of_staleness)
    whole = Terms.concatenate(gaps)
    precision = joint_nats(Terms.concatenate(engines or gaps), num_elements)
    stale = joint_nats(Terms.concatenate(stales), num_elements) if stales else 0.0
    for _ in range(staleness, 2):  # of which the first may have warmed up
        seconds.timed("update", learn)
    phases = ("rollout", "recompute", "update")
    images = len(texts[-1]) * config.rollout.n
    cost = Cost(images=images, **{phase: seconds.fastest(phase) for phase in phases})
    return report_of(config, whole, num_elements, precision=precision, stale=stale, cost=cost)


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


def _learn_anything(actor: DiffusionActor, rollout: Rollout, gap: Terms, *, training_step: int) -> None:
    """One training step on random advantages: it moves the weights about as far as one that learns."""
    draw = torch.Generator().manual_seed(training_step)
    advantages = torch.randn(rollout.num_samples, generator=draw).to(actor.device)
    batch = ActorBatch(
        rollout=replace(rollout, images=None),
        advantages=advantages,
        old_log_probs=gap.old_log_prob.to(actor.device),
        old_means=rollout.window.means,
    )
    actor.update(batch, AutoMode.of(actor.config).correction, training_step=training_step)


def report_of(
    config: Config,
    gap: Terms,
    num_elements: int | None,
    *,
    precision: float | None = None,
    stale: float = 0.0,
    cost: Cost | None = None,
    notes: tuple[str, ...] = (),
    older_weights: bool = False,
) -> AuditReport:
    """The report on a gap; without `num_elements` it holds what needs no unit of whole steps, and no advice.

    Args:
        config: the run's.
        gap: what was measured.
        num_elements: `D`, where known.
        precision, stale: joint nats of the engine alone, and of staleness alone, where they were told apart.
        cost: of the recompute pass, where it was timed.
        notes: what is to be said beside it.
        older_weights: whether the weights that sampled are known to be older, where the two parts were not told apart.
    """
    loss = resolve_loss(config.actor)
    limit = loss.ratio_limit(config.actor)
    limit = None if limit == UNBOUNDED else limit
    distance = ratio_distance(delta(gap), gap.old_rollout_kl, gap.std, config.actor)
    steps = gap_by_step(gap, distance, limit)
    needed = {step.step_index: step.clip_needed for step in steps}
    if config.actor.ratio_level != "step":  # the window has one ratio
        needed = dict.fromkeys(needed, max(needed.values()))
    report = AuditReport(
        advice=None,
        num_samples=len(gap.old_log_prob),
        num_steps=gap.old_log_prob.shape[1],
        num_elements=num_elements,
        loss_mode=config.actor.loss_mode,
        clip_limit=limit,
        staleness=config.rollout.max_weight_age,
        outside_clip=None if limit is None else fraction(distance > clip_by_term(limit, gap.step_index)),
        cost=cost,
        steps=steps,
        presets=preset_outcomes(gap, num_elements, config),
        notes=notes,
    )
    if num_elements is None:
        return report
    joint = joint_nats(gap, num_elements)
    outlier_fraction, band = outliers(gap, num_elements)
    scales = worth_of_weights(gap, num_elements)
    facts = Facts(
        num_steps=report.num_steps,
        num_elements=num_elements,
        joint_nats=joint,
        exact_ess=next(row.expected_ess for row in scales if (row.scale, row.level) == ("sum", "sequence")),
        stale_nats=stale,
        clip_limit=limit,
        clip_by_step=needed,
        window_end=config.sampling.sde_window_range[1],
        loss_mode=config.actor.loss_mode,
        limit=loss.limit,
        ratio_level=config.actor.ratio_level,
        unscaled=config.sampling.cps_unscaled,
        outliers=outlier_fraction,
        outlier_band=band,
        recompute_share=None if cost is None else cost.share,
        older_weights=older_weights or config.rollout.max_weight_age > 0,
        quantization=trainer_quantization(config),
    )
    return replace(
        report,
        advice=advise(facts),
        joint_nats=joint,
        precision_nats=joint if precision is None else precision,
        stale_nats=stale,
        outliers=outlier_fraction,
        outlier_band=band,
        scales=scales,
    )
