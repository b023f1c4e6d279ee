"""A training step's samples and their rewards: sampled on demand, or ahead of time by Ray workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flowcorr import distributed
from flowcorr.advantages import whole_groups
from flowcorr.algorithm import needs_rollout_means
from flowcorr.errors import BackendError
from flowcorr.metrics import Metrics, Stats, maximum, mean, total
from flowcorr.questions.ask import ask
from flowcorr.questions.compared import Compared
from flowcorr.questions.question import OF_ROLLOUTS
from flowcorr.records import ImageArray, Prompt, Rollout
from flowcorr.rewards import Reward, RewardOutput, report_broken, score_batch, scored_ahead
from flowcorr.rollout import decode
from flowcorr.rollout.broken import find_broken
from flowcorr.rollout.build import as_rollout
from flowcorr.rollout.precision import decoder_dtype
from flowcorr.trainer.run import PendingStep, TrainingRun
from flowcorr.workers.reward import RayReward
from flowcorr.workers.rollout import RayRollout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """A training step's samples on this rank.

    Attributes:
        rollout: the `b` samples of groups whose weights were not too old, without images.
        fresh: `[b]`, their places among all `B` samples.
        images: of all samples.
        prompts: `B`, one for each sample.
        group_ids: `[B]`.
        broken: why a sample has no picture, by its place among all.
        reward: the reward to call with all images, which may already be scoring them.
        metrics: age of the weights, and the time spent waiting for workers.
    """

    rollout: Rollout
    fresh: np.ndarray
    images: ImageArray
    prompts: list[Prompt]
    group_ids: np.ndarray
    broken: Mapping[int, str]
    reward: Reward
    metrics: Metrics


def prefetch(run: TrainingRun, step: int) -> None:
    """Let Ray workers sample for the next training step, `step`, and for the later ones that staleness allows.

    A step's prompts follow from the position of the prompt stream, and its weights from its distance to the next step.
    A resumed run therefore samples again exactly what was in flight when it was interrupted.
    """
    config, engine = run.config, run.engine
    if not isinstance(engine, RayRollout):
        return
    count = config.rollout.prompts_per_step
    last = min(step + config.rollout.max_staleness, config.trainer.total_steps)
    for ahead, future_step in enumerate(range(step, last + 1)):
        if future_step in run.in_flight:
            continue
        drawn = run.prompts.peek(count, skip=ahead * count)
        groups = distributed.local_indices(count)
        rollout = engine.submit(
            run.cache([drawn[group] for group in groups]),
            groups,
            training_step=future_step,
            with_means=needs_rollout_means(config),
            ahead=ahead,
        )
        reward = run.reward
        if isinstance(reward, RayReward):
            size = rollout.groups_per_shard
            shard_prompts = [
                [drawn[group] for group in groups[begin : begin + size] for _ in range(config.rollout.n)]
                for begin in range(0, len(groups), size)
            ]
            reward = reward.follow(rollout.shards, shard_prompts)
        run.in_flight[future_step] = PendingStep(rollout=rollout, reward=reward)


def collect(run: TrainingRun, drawn: list[Prompt], groups: range, step: int) -> Samples:
    """Sample this rank's `groups` of the prompts `drawn` for training step `step`, or wait for the workers that do.

    Raises:
        BackendError: every sample comes from weights that are too old, or from a version that was never sent, a sync
            did not arrive, or the samples are of other groups.
    """
    pending = run.in_flight.pop(step, None)
    prompts = [drawn[group] for group in groups for _ in range(run.config.rollout.n)]
    reward, on_images = scored_ahead(run.reward if pending is None else pending.reward, prompts)
    stats: Stats = {}
    if pending is None:
        rollout = as_rollout(
            run.engine.sample(
                run.cache([drawn[group] for group in groups]),
                groups,
                training_step=step,
                with_means=needs_rollout_means(run.config),
                on_images=on_images,
            )
        )
    else:
        begin = time.perf_counter()
        rollout = pending.rollout.result()
        stats["timing/rollout_wait"] = maximum(time.perf_counter() - begin)
        on_images(rollout.decoded)
    count = run.config.rollout.n
    owners = [group for group in groups for _ in range(count)]
    if rollout.group_ids.tolist() != owners:
        raise BackendError(
            f"the rollout engine returned {rollout.num_samples} samples of the groups "
            f"{list(dict.fromkeys(rollout.group_ids.tolist()))} where it was asked for {count} of each of "
            f"{list(groups)}: Rollout.group_ids has to come group by group, in the order of `groups`"
        )
    rollout = replace(rollout, members=torch.arange(len(owners)) % count).validate()
    images = rollout.decoded.cpu().numpy()
    rollout = replace(rollout, images=None).to(run.actor.device)
    broken = _find_broken(run, rollout)
    whole = [place for place in range(len(owners)) if place not in broken]
    if whole:
        compared = Compared(rollout=rollout.only(torch.tensor(whole)), actor=run.actor, training_step=step)
        stats |= ask(compared, OF_ROLLOUTS)
        if run.questions:
            pixels = torch.from_numpy(images[whole]).to(run.actor.device)
            with_images = replace(compared, rollout=replace(compared.rollout, images=pixels))
            stats |= ask(with_images, run.questions)
    stale, ages = _find_stale(run, rollout)
    fresh = whole_groups(rollout.group_ids, stale)
    return Samples(
        rollout=rollout.only(fresh),
        fresh=fresh.cpu().numpy(),
        images=images,
        prompts=prompts,
        group_ids=rollout.group_ids.cpu().numpy(),
        broken=broken,
        reward=reward,
        metrics=Metrics(stats, ages),
    )


def _find_broken(run: TrainingRun, rollout: Rollout) -> dict[int, str]:
    """Why each sample without a picture has none, and which image of which group it is, by its place.

    Where an engine does not say whether its pixels were finite, its final latents are decoded here.

    Raises:
        BackendError: it returns no final latents either.
    """
    config, finite = run.config, rollout.finite_images
    if finite is None:
        if rollout.final_latents is None:
            raise BackendError(
                "the rollout engine returns neither Rollout.finite_images nor Rollout.final_latents, so an image whose "
                "decoder overflowed would be scored like any other; return one of them"
            )
        _, finite = decode(run.actor.family, rollout.final_latents)
    latents = (rollout.window.latents, rollout.window.next_latents, rollout.final_latents)
    broken = find_broken(
        [part for part in latents if part is not None],
        finite,
        samples_in=f"rollout.dtype={config.rollout.dtype}",
        decodes_in=decoder_dtype(config),
    )
    groups, count = rollout.group_ids.tolist(), config.rollout.n
    return {place: f"image {place % count} of group {groups[place]}: {why}" for place, why in broken.items()}


def score(run: TrainingRun, samples: Samples) -> RewardOutput:
    """Score a batch, handle failures as `reward.on_error` says, and record them as events; see `score_batch`.

    A sample without a picture has failed, and no reward sees it.
    """
    on_error = run.config.reward.on_error
    try:
        report_broken(samples.prompts, samples.broken, on_error)
        scored = score_batch(
            samples.reward, samples.images, samples.prompts, on_error=on_error, broken=samples.broken
        )
    except BackendError as error:
        run.on_event("reward_failed", error=str(error))
        raise
    if scored.failed.any():
        run.on_event("reward_failed", samples=int(scored.failed.sum()), of=len(scored.failed))
    return scored


def drop_failed_groups(rollout: Rollout, failed: np.ndarray) -> Tensor:
    """Indices `[B']` of the samples whose whole group succeeded; with several ranks, one rank may have none.

    Raises:
        BackendError: no group is left on any rank.
    """
    kept = whole_groups(rollout.group_ids, failed)
    if not sum(distributed.gather(len(kept), "the rewards that succeeded")):
        raise BackendError(
            f"{failed.sum()} of {len(failed)} samples failed, at least one in every group of this step, so nothing is "
            "left to train on"
        )
    return kept


def _weight_ages(run: TrainingRun, rollout: Rollout) -> np.ndarray:
    """The age `[B]` of the weights that sampled: the number of syncs since then that brought a newer version.

    Raises:
        BackendError: the engine names a version that it was never sent.
    """
    synced = np.array([weights.version for weights in run.engine.history])
    versions = rollout.policy_versions.cpu().numpy()
    newest = run.actor.weights.version
    if synced.max(initial=0) < newest:
        raise BackendError(
            f"the rollout engine's history ends with weights of version {synced.max(initial=0)}, and version {newest} "
            "was synced: a sync did not arrive, or RolloutEngine.history does not keep the newest weights"
        )
    if versions.max(initial=0) > newest:
        raise BackendError(
            f"the rollout engine says that weights of version {versions.max()} sampled, and the newest are of version "
            f"{newest}: Rollout.policy_versions has to be the Weights.version of the sync whose weights sampled"
        )
    return (synced > versions[:, None]).sum(1)


def _find_stale(run: TrainingRun, rollout: Rollout) -> tuple[np.ndarray, Stats]:
    """Which samples `[B]` come from weights older than `rollout.staleness` or `rollout.max_staleness` allows.

    Raises:
        BackendError: all samples do.
    """
    ages = _weight_ages(run, rollout)
    stale = ages > run.config.rollout.max_weight_age
    if stale.any():
        run.on_event("stale_dropped", samples=int(stale.sum()), of=len(stale), oldest=int(ages.max()))
    if stale.all():
        rollout_config = run.config.rollout
        raise BackendError(
            f"the rollout engine sampled everything with weights that are {ages.min()} or more training steps old, "
            f"and at most {rollout_config.max_weight_age} are allowed (rollout.staleness={rollout_config.staleness}, "
            f"rollout.max_staleness={rollout_config.max_staleness}): it does not load new weights"
        )
    stats = {
        "rollout/staleness_mean": mean(int(ages.sum()), len(ages)),
        "rollout/staleness_max": maximum(int(ages.max())),
        "rollout/dropped_stale_samples": total(int(stale.sum())),
    }
    return stale, stats
