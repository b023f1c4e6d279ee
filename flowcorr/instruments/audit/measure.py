"""Measures the gap between rollout engine and actor, and the effect of each correction on it.

A few rollout batches are sampled with the configured engine and scored again by the actor, as decoupled mode
does. Then a training step is made on random advantages, for its time alone. A stale engine differs from the actor only
once something was learned, so there as many such steps come first as its weights lag behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from flowcorr.actor import DiffusionActor
from flowcorr.algorithm import AutoMode
from flowcorr.algorithm.bands import WARM_UP
from flowcorr.config.rollout import RolloutConfig
from flowcorr.config.schema import Config
from flowcorr.data import PromptStream, load_prompts
from flowcorr.errors import ConfigError
from flowcorr.health.finding import Finding
from flowcorr.health.setting import Setting
from flowcorr.instruments.audit.effect import Steps
from flowcorr.instruments.audit.explained import Stated, beyond, velocity_of
from flowcorr.instruments.audit.facts import Facts
from flowcorr.instruments.audit.gap import measure_gap, split_gap
from flowcorr.instruments.audit.judge import report_of
from flowcorr.instruments.audit.presets import compare
from flowcorr.instruments.audit.tables import joint_nats
from flowcorr.instruments.gap_table import Gap
from flowcorr.instruments.outcome import Fact, Report
from flowcorr.instruments.plan.answers import duration
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.records import ActorBatch, Prompt, Rollout, Terms
from flowcorr.rollout import RolloutEngine
from flowcorr.trainer.setup import build_stacks, load_model

NUM_BATCHES = 2
MAX_IMAGES = 96  # a batch: their steps give quantiles, and more take minutes with a large model

Result = TypeVar("Result")


def audit(config: Config, *, num_batches: int = NUM_BATCHES, title: str = "") -> Report:
    """Build the actor and the engine of a configuration, and audit them on its first training prompts.

    Args:
        config: the run's configuration; nothing is rewarded, so its reward is not even built.
        num_batches: rollout batches, each of `rollout.prompts_per_step * rollout.n` images; if those are more than
            `MAX_IMAGES`, of fewer prompts.
        title: the recipe with its overrides.

    Raises:
        ConfigError: `num_batches` is below 1, or something in `config` cannot work.
        BackendError: the engine returns no step means, or a log-prob is not finite.
    """
    if num_batches < 1:
        raise ConfigError(f"--batches {num_batches} measures nothing; use 1 or more")
    # The steps that make an engine stale have to move the weights as far as those of a run after its warm-up.
    config = replace(config, actor=replace(config.actor, warmup_steps=0), rollout=few_prompts(config))
    stream = PromptStream(load_prompts(config.data).train, seed=config.trainer.seed)
    prompts = [
        stream.next(config.rollout.prompts_per_step)
        for _ in range(config.rollout.max_weight_age + num_batches)
    ]
    stacks = build_stacks(config, load_model(config), [prompt for batch in prompts for prompt in batch])
    try:
        stacks.engine.sync(stacks.actor.weights.snapshot())
        return examine_batches(stacks.actor, stacks.engine, stacks.cache, prompts, title=title)
    finally:
        stacks.engine.close()


def few_prompts(config: Config) -> RolloutConfig:
    """The rollout section with no more prompts a batch than an audit needs."""
    rollout = config.rollout
    enough = max(MAX_IMAGES // rollout.n, config.actor.mini_batches)
    return replace(rollout, prompts_per_step=min(rollout.prompts_per_step, enough))


def examine_batches(
    actor: DiffusionActor,
    engine: RolloutEngine,
    cache: PromptCache,
    prompts: Sequence[Sequence[Prompt]],
    *,
    title: str = "",
) -> Report:
    """Audit an actor and its engine; the first `rollout.max_weight_age` batches of `prompts` make the engine stale.

    Raises:
        BackendError: the engine returns no step means, or a log-prob is not finite.
    """
    config, seconds = actor.config, Seconds(actor.device)
    staleness = config.rollout.max_weight_age
    gaps, engines, stales, velocities = [], [], [], []
    for step, batch in enumerate(prompts):
        sample = partial(
            engine.sample, cache(batch), range(len(batch)), training_step=step + 1, with_means=True
        )
        rollout = seconds.timed("rollout", sample).to(actor.device)
        # Nothing is rewarded, so of each prompt the first that a step would learn from.
        members = torch.arange(rollout.num_samples) % config.rollout.n
        rollout = rollout.only((members < config.rollout.learned_per_prompt).nonzero().squeeze(1))
        scored = seconds.timed("recompute", partial(measure_gap, actor, rollout))
        learn = partial(_learn_anything, actor, rollout, scored, training_step=step + 1)
        if step < staleness:
            seconds.timed("update", learn)
            engine.sync(actor.weights.snapshot())
            continue
        gaps.append(scored)
        velocities.append(velocity_of(rollout.window, config.sampling))
        if staleness:
            of_engine, of_staleness = split_gap(actor, rollout, engine.history)
            engines.append(of_engine)
            stales.append(of_staleness)
    whole, of_precision = Terms.concatenate(gaps), Terms.concatenate(engines or gaps)
    stale = joint_nats(Terms.concatenate(stales)) if stales else 0.0
    for _ in range(staleness, 2):  # of which the first may have warmed up
        seconds.timed("update", learn)
    fastest = {phase: seconds.fastest(phase) for phase in ("rollout", "recompute", "update")}
    share = fastest["recompute"] / sum(fastest.values())
    setting = Setting.of(config)
    gap = Gap.of(whole, setting)
    return report_of(
        f"Audit of {title}",
        gap,
        Facts.of(
            gap,
            stale_nats=stale,
            recompute_share=share,
            older_weights=staleness > 0,
            beyond=beyond(of_precision, replace(Stated.of(config), velocity=max(velocities))),
        ),
        presets=compare([as_steps(gap)], setting.correction, warm_up=WARM_UP),
        beside=[
            *_of_cost(fastest, share, len(prompts[-1]) * config.rollout.n),
            *_of_staleness(setting, joint_nats(of_precision), stale),
        ],
        notes=_on_unmeasured(whole, config),
    )


def _on_unmeasured(gap: Terms, config: Config) -> list[Finding]:
    """A note on steps that windows can have, and no window of these batches had."""
    steps = sorted({*range(*config.sampling.sde_window_range)} - {*gap.step_index.unique().tolist()})
    if not steps:
        return []
    return [
        Finding(
            level="note",
            cause="unmeasured",
            sentence="no window held some steps of sampling.sde_window_range, for which this advice may not hold",
            numbers={"steps": steps},
            remedy="sample more windows: raise --batches",
        )
    ]


def as_steps(gap: Gap) -> Steps:
    """A gap as one training step on random advantages, before any update."""
    terms, samples = gap.terms, len(gap.terms.old_log_prob)
    draw = torch.Generator().manual_seed(0)
    advantage = torch.randn(samples, generator=draw, dtype=torch.float64)
    drawn = replace(
        terms,
        log_prob=terms.old_log_prob,
        advantage=advantage[:, None].expand_as(terms.old_log_prob),
        old_kl=torch.zeros_like(terms.old_log_prob),
        rollout_kl=terms.old_rollout_kl,
    )
    return Steps(terms=drawn, sizes={0: samples}, setting=gap.setting, group_ids=torch.arange(samples))


def _of_cost(fastest: Mapping[str, float], share: float, images: int) -> list[Fact]:
    """Facts on the seconds of the fastest batch by phase, without warm-up; the reward's time is in no part of them."""
    speed = images / fastest["rollout"]
    return [
        Fact(
            name="recompute_share",
            value=share,
            text=f"recompute pass: {duration(fastest['recompute'])} a step beside {duration(fastest['rollout'])} of "
            f"rollout and {duration(fastest['update'])} of update, {share:.0%} of the three together (reward not "
            "counted)",
        ),
        Fact(name="images_per_second", value=speed, text=f"the rollout makes {speed:.3g} images a second"),
    ]


def _of_staleness(setting: Setting, precision: float, stale: float) -> list[Fact]:
    lag = setting.staleness
    text = (
        f"the engine lags {lag} training steps behind; they were made on random advantages, which stand in for "
        f"learning: {stale:.3g} joint nats are staleness, {precision:.3g} the engine's"
    )
    return [
        Fact(name="staleness", value=lag, text=text if lag else ""),
        Fact(name="precision_nats", value=precision),
        Fact(name="stale_nats", value=stale),
    ]


class Seconds:
    """Times phases by a clock; each ends when the device has finished its work."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._seen: dict[str, list[float]] = {}

    def timed(self, phase: str, work: Callable[[], Result]) -> Result:
        begin = self._clock()
        result = work()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seen.setdefault(phase, []).append(self._clock() - begin)
        return result

    def fastest(self, phase: str) -> float:
        return min(self._seen[phase])


def _learn_anything(actor: DiffusionActor, rollout: Rollout, gap: Terms, *, training_step: int) -> None:
    """Take one training step on random advantages; it moves the weights about as far as one that learns."""
    draw = torch.Generator().manual_seed(training_step)
    advantages = torch.randn(rollout.num_samples, generator=draw).to(actor.device)
    batch = ActorBatch(
        rollout=replace(rollout, images=None),
        advantages=advantages,
        old_log_probs=gap.old_log_prob.to(actor.device),
        old_means=rollout.window.means,
    )
    actor.update(batch, AutoMode.of(actor.config).correction, training_step=training_step)
