"""One training step on one page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from flowcorr import distributed, sde
from flowcorr.advantages import group_advantages, most_varied, selection_stats
from flowcorr.algorithm import (
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
)
from flowcorr.dumps import DumpedTerms
from flowcorr.metrics import Metrics, Stats
from flowcorr.questions.gap_split import old_scores
from flowcorr.questions.noise import FirstScores
from flowcorr.records import ActorBatch, ImageArray, Prompt, Rollout, Scores
from flowcorr.rewards import training_scores
from flowcorr.trainer.collect import collect, drop_failed_groups, score
from flowcorr.trainer.faulty_workers import faults_by_worker
from flowcorr.trainer.log_probs import logged_terms, sampled_terms
from flowcorr.trainer.measurements import measure, own_metrics
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.timing import Stopwatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """The results of a training step, for logging: metrics of all ranks, samples of this rank.

    Attributes:
        metrics: merged over the ranks.
        images: of `B` prompts.
        prompts: one for each of them.
        scores: `[B]`, the rewards.
        terms: the terms of the loss, if `trainer.dump_log_probs` is set and this rank has samples.
    """

    metrics: Metrics
    images: ImageArray
    prompts: list[Prompt]
    scores: np.ndarray
    terms: DumpedTerms | None = None


def train_step(run: TrainingRun, step: int, on_phase: Callable[[str], None]) -> StepResult:
    """Sample, score, correct, learn: prompts -> rollout -> rewards -> advantages -> correction -> gate -> update.

    Raises:
        RolloutFault: what was measured proves a fault, see `trainer.on_fault`.
    """
    config, actor, correction = run.config, run.actor, run.mode.correction
    watch = Stopwatch(on_phase, actor.device)
    sde.seed_globals(config.trainer.seed, "step", step, distributed.rank())

    drawn = run.prompts.next(config.rollout.prompts_per_step)
    sharded = actor.weights.sharded  # then a forward pass is a collective
    with distributed.fail_together("the rollout", has_collectives=sharded), watch("rollout"):
        samples = collect(run, drawn, distributed.local_indices(len(drawn)), step)
    rollout, old = samples.rollout, None
    first_scores = FirstScores(rollout, actor, step)

    # Old log-probs by the trainer's own arithmetic: the ratio begins at 1, and the engine's gap stays out of the clip.
    def recompute(rollout: Rollout) -> Scores:
        with watch("old_log_prob"):
            return old_scores(actor, run.engine.history, rollout, first_scores)

    recomputes, selects = correction.mode != "bypass", config.rollout.n_learned is not None
    if recomputes and not selects:  # while a reward that has a thread of its own is computed
        old = recompute(rollout)
    with distributed.fail_together("the rewards"), watch("reward"):
        scored = score(run, samples)

    # Whole groups only: an advantage compares an image with the others of its prompt.
    kept, std = drop_failed_groups(rollout, scored.failed[samples.fresh]), config.algorithm.advantage_std
    succeeded = scored.map(lambda values: values[samples.fresh][kept.cpu().numpy()])
    group_ids = rollout.group_ids[kept]
    rewards = training_scores(succeeded, config.reward.terms, group_ids)
    # Of each group those whose rewards vary most, and from here on they are the group: their advantages have mean 0, so
    # that a drift that all of them share cancels. With the mean of all that were sampled it would not.
    chosen = most_varied(rewards, group_ids, config.rollout.learned_per_prompt)
    rollout, learned = rollout.only(kept[chosen]), chosen.cpu().numpy()
    succeeded = succeeded.map(lambda values: values[learned])
    if recomputes:
        old = recompute(rollout) if old is None else old.select(kept[chosen])
    advantages = group_advantages(rewards[chosen], rollout.group_ids, std=std)
    batch = ActorBatch(rollout=rollout, advantages=advantages)
    metrics: list[Metrics | Stats] = [samples.metrics]
    if selects:
        metrics.append(selection_stats(rewards, group_ids, chosen, std=std))

    if old is None:
        batch = apply_bypass_mode_to_diffusion_batch(batch)
    else:
        batch = replace(batch, old_log_probs=old.log_probs, old_means=old.means)
    metrics += measure(run, samples, scored, batch, old, step, watch)
    if correction.mode == "decoupled":
        with watch("correction"):
            batch, corrected = apply_rollout_correction_to_diffusion_batch(
                batch, correction, actor_config=config.actor, num_steps=config.sampling.num_inference_steps
            )
        metrics.append(corrected)
    if old is not None:
        metrics.append(first_scores.metrics())
    measured = Metrics(*metrics).across_ranks()
    bypass = correction.mode == "bypass"
    evidence = partial(sampled_terms, batch, advantages=advantages, rewards=succeeded.scores, bypass=bypass)
    by_worker = partial(faults_by_worker, run, samples, scored, step)
    run.gate.check(step, measured, evidence, by_worker)  # before anything is learned from the samples

    with watch("update"):
        observe = first_scores if old is None else None
        update = actor.update(batch, correction, training_step=step, observe=observe)
        metrics = [update.metrics]
        if old is None:
            metrics += [
                first_scores.metrics(),
                *(own_metrics(run.rows, terms) for terms in update.first_terms),
            ]
        actor.optimizer.adamw.zero_grad()  # gradients would fill memory until the next update
    with watch("sync"):
        run.engine.sync(actor.weights.for_engine())

    metrics.append(watch.metrics(num_images=len(drawn) * config.rollout.n))
    merged = Metrics(measured, Metrics(*metrics).across_ranks())
    merged = Metrics(merged, run.mode.observe(merged), run.residuals.observe(merged))
    run.gate.check(step, merged, evidence)
    terms = evidence() if config.trainer.dump_log_probs else None
    if terms is not None:
        terms = logged_terms(terms, batch, update)
    return StepResult(
        metrics=merged,
        images=samples.images,
        prompts=samples.prompts,
        scores=scored.scores,
        terms=terms,
    )
