"""Finds the rollout workers whose own samples prove a fault, so that a run goes on with the others.

A training step that only a fault explains is asked worker by worker: the questions of a batch, the step noise, and
replays of images, by the rules of all samples. Nothing was learned from the step, and noise is seeded by the sample:
sampled again without the faulty workers, it is the step that a run without them makes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flowcorr import distributed
from flowcorr.errors import RolloutFault
from flowcorr.health.finding import Finding
from flowcorr.health.rule import VELOCITY_DISTANCE
from flowcorr.health.rules import NUM_ELEMENTS, USUAL_GAP
from flowcorr.metrics import Metrics, Stats
from flowcorr.questions.ask import ask
from flowcorr.questions.compared import Compared
from flowcorr.questions.question import OF_ROLLOUTS, STEP_NOISE
from flowcorr.rewards import RewardOutput
from flowcorr.trainer.collect import Samples
from flowcorr.trainer.measurements import measure_replay
from flowcorr.trainer.run import TrainingRun


def faults_by_worker(
    run: TrainingRun, samples: Samples, scored: RewardOutput, step: int, fault: RolloutFault
) -> dict[int, list[Finding]]:
    """Find each worker with a fault in its own samples; every rank has to call.

    Args:
        run: the training run, whose weights are still those from before the update.
        samples: of training step `step`.
        scored: their scores.
        step: the training step.
        fault: of all samples together.

    Returns:
        The findings of each worker on the first rank that has any of it.
    """
    workers = samples.rollout.worker_ids
    assert workers is not None, "Ray workers name themselves"
    facts = {
        name: fault.metrics[name]
        for name in (NUM_ELEMENTS, USUAL_GAP, VELOCITY_DISTANCE)
        if name in fault.metrics
    }
    faults: dict[int, list[Finding]] = {}
    with distributed.fail_together("the search for faulty workers"):
        for worker in workers.unique().tolist():
            measured = _measure(run, samples, (workers == worker).nonzero().squeeze(1), scored, step)
            faults[worker] = run.gate.faults(facts | measured.compute())
    ranks = distributed.gather(faults, "the faults of each rollout worker")
    return {worker: findings for rank in reversed(ranks) for worker, findings in rank.items() if findings}


def _measure(run: TrainingRun, samples: Samples, rows: Tensor, scored: RewardOutput, step: int) -> Metrics:
    """Metrics of some samples, of whole groups. Ranks that share a transformer make no passes of their own with it."""
    passes = not run.actor.weights.sharded
    rollout, fresh = samples.rollout.only(rows), samples.fresh[rows.cpu().numpy()]
    whole = [row for row, place in enumerate(fresh) if place not in samples.broken]
    stats: Stats = {}
    if whole:
        compared = Compared(rollout=rollout.only(torch.tensor(whole)), actor=run.actor, training_step=step)
        if passes:
            scores = run.actor.log_probs(compared.rollout, with_means=True)
            compared = replace(compared, given_scores=scores)
        stats |= ask(compared, (*OF_ROLLOUTS, STEP_NOISE) if passes else OF_ROLLOUTS)
    if passes and run.config.rollout.replay_every:
        chosen = replace(samples, rollout=rollout, fresh=fresh)
        stats |= measure_replay(run, chosen, scored, step)[0]
    return Metrics(stats)
