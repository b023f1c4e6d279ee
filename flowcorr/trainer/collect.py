"""Trajectories and what scores them: sampled when their training step comes, or by workers ahead of it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from flowcorr import distributed
from flowcorr.algorithm import needs_rollout_means
from flowcorr.errors import BackendError
from flowcorr.metrics import Metrics, maximum, mean, total
from flowcorr.records import Prompt, Rollout
from flowcorr.rewards import Reward, RewardOutput, score_batch
from flowcorr.rewards.ray_pool import RayReward
from flowcorr.rollout.ray_pool import RayPool, Sampling

if TYPE_CHECKING:
    from flowcorr.trainer.step import Parts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pending:
    """A training step's samples that workers are at, and their reward, which may have begun to score them."""

    sampling: Sampling
    reward: Reward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collected:
    """A training step's samples on this rank.

    Attributes:
        rollout: the samples.
        reward: what scores them.
        stale: `[B]` bool, True where a sample is too old to be trained on.
        metrics: how old they are, and how long they were waited for.
    """

    rollout: Rollout
    reward: Reward
    stale: np.ndarray
    metrics: Metrics


def prefetch(parts: Parts, step: int) -> None:
    """Let workers sample for training step `step`, the next one, and for those that may run ahead of it.

    A step's prompts follow from the position of the stream, and its weights from how far ahead it lies: what was in
    flight when a run ended is sampled again alike when it goes on.
    """
    config, engine = parts.config, parts.engine
    if not isinstance(engine, RayPool):
        return
    count = config.rollout.prompts_per_step
    last = min(step + config.rollout.max_staleness, config.trainer.total_steps)
    for ahead, later in enumerate(range(step, last + 1)):
        if later in parts.in_flight:
            continue
        drawn = parts.prompts.peek(count, skip=ahead * count)
        groups = distributed.share(count)
        sampling = engine.submit(
            parts.cache([drawn[group].text for group in groups]),
            groups,
            training_step=later,
            with_means=needs_rollout_means(config),
            ahead=ahead,
        )
        reward = parts.reward
        if isinstance(reward, RayReward):
            size = sampling.groups_a_shard
            asked = [
                [drawn[group] for group in groups[begin : begin + size] for _ in range(config.rollout.n)]
                for begin in range(0, len(groups), size)
            ]
            reward = reward.follow(sampling.shards, asked)
        parts.in_flight[later] = Pending(sampling=sampling, reward=reward)


def collect(parts: Parts, drawn: list[Prompt], groups: range, step: int) -> Collected:
    """This rank's `groups` of the `drawn` prompts of training step `step`, sampled now or taken from workers."""
    pending = parts.in_flight.pop(step, None)
    if pending is None:
        rollout, reward = _sample(parts, drawn, groups, step), parts.reward
        metrics = Metrics()
    else:
        begin = time.perf_counter()
        rollout, reward = pending.sampling.result().to(parts.actor.device), pending.reward
        metrics = Metrics.from_stats({"timing/rollout_wait": maximum(time.perf_counter() - begin)})
    if parts.actor.sharded:
        spare = torch.tensor([0], device=parts.actor.device)
        parts.actor.spare = replace(rollout, images=None).select(spare)
    rollout = rollout.select(slice(0, len(groups) * parts.config.rollout.n))
    stale, found = _find_stale(parts, rollout)
    return Collected(rollout=rollout, reward=reward, stale=stale, metrics=metrics.merge(found))


def score(
    parts: Parts, reward: Reward, images: np.ndarray, prompts: list[Prompt]
) -> tuple[RewardOutput, np.ndarray]:
    """`score_batch` as `reward.on_error` says; failures are recorded."""
    try:
        scored, failed = score_batch(reward, images, prompts, on_error=parts.config.reward.on_error)
    except BackendError as error:
        parts.on_event("reward_failed", error=str(error))
        raise
    if failed.any():
        parts.on_event("reward_failed", samples=int(failed.sum()), of=len(failed))
    return scored, failed


def _ages(parts: Parts, rollout: Rollout) -> np.ndarray:
    """How many training steps ago the weights were new that sampled: syncs since then that brought others, `[B]`."""
    synced = np.array([weights.version for weights in parts.engine.history])
    return (synced > rollout.policy_versions.cpu().numpy()[:, None]).sum(1)


def _find_stale(parts: Parts, rollout: Rollout) -> tuple[np.ndarray, Metrics]:
    """Samples `[B]` bool that are older than `rollout.staleness` or `rollout.max_staleness` has it.

    Raises:
        BackendError: all of them are.
    """
    ages = _ages(parts, rollout)
    stale = ages > parts.config.rollout.lag
    if stale.any():
        parts.on_event("stale_dropped", samples=int(stale.sum()), of=len(stale), oldest=int(ages.max()))
    if stale.all():
        raise BackendError(
            f"the rollout engine sampled everything with weights of {ages.min()} or more training steps ago, and "
            f"{parts.config.rollout.lag} were asked for: it does not take new weights"
        )
    stats = {
        "rollout/staleness_mean": mean(ages.sum(), len(ages)),
        "rollout/staleness_max": maximum(ages.max()),
        "rollout/dropped_stale_samples": total(stale.sum()),
    }
    return stale, Metrics.from_stats(stats)


def _sample(parts: Parts, drawn: list[Prompt], groups: range, step: int) -> Rollout:
    """Sample in this process.

    A forward pass of sharded weights needs all ranks: there, one with fewer groups than others samples one twice.
    """
    sampled = list(groups)
    if parts.actor.sharded:
        sampled += sampled[:1] * (math.ceil(len(drawn) / distributed.world_size()) - len(groups))
    return parts.engine.sample(
        parts.cache([drawn[group].text for group in sampled]),
        sampled,
        training_step=step,
        with_means=needs_rollout_means(parts.config),
    ).to(parts.actor.device)
