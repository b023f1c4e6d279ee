"""Rewards in Ray workers: a shard of a rollout is scored as soon as it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from flowcorr.config.task import RewardConfig, RewardTerm
from flowcorr.records import ImageArray, Images, Prompt
from flowcorr.rewards.base import Reward, RewardOutput, as_reward_output, reward_name
from flowcorr.rewards.combine import build_reward
from flowcorr.workers.dispatcher import WorkerOptions
from flowcorr.workers.pool import Answer, OnEvent, WorkerPool, ignore_event

BATCH_SIZE = 16  # images of one task, where all images come at once; independent of the number of workers


class RayReward:
    """A recipe's reward, computed in workers; itself a `Reward`, which `score_batch` calls like any other.

    Args:
        config: the reward and its workers.
        address: see `flowcorr.workers.cluster.Cluster`.
        num_threads: CPU threads of torch in a worker; None keeps torch's default.
        on_event: gets a record of each worker that is lost or replaced.

    Raises:
        ConfigError: `build_reward` raised it in a worker, or the cluster has no room for the workers.
        MissingExtraError: Ray, or an extra that a reward needs, is not installed.
        BackendError: a worker does not start.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        address: str | None = None,
        num_threads: int | None = None,
        on_event: OnEvent = ignore_event,
    ) -> None:
        self._workers = WorkerPool(
            partial(RewardWorker, config.terms, config.gold),
            WorkerOptions(
                section="reward",
                num_workers=config.num_workers,
                resources=config.worker_resources,
                timeout=config.timeout,
                num_threads=num_threads,
                own_errors=(Exception,),  # no retry here: `score_batch` handles the failures of a reward
            ),
            address=address,
            on_event=on_event,
        )

    @cached_property
    def name(self) -> str:
        """The reward's name in messages."""
        (name,) = self._workers.submit("the reward's name", "name").result().values
        return str(name)

    def __call__(self, images: ImageArray, prompts: list[Prompt]) -> RewardOutput:
        """Score images in batches of `BATCH_SIZE`.

        Raises:
            Exception: the reward's own, or `BackendError` if workers were lost repeatedly.
        """
        import torch

        begins = range(0, len(prompts), BATCH_SIZE)
        batches = [slice(begin, begin + BATCH_SIZE) for begin in begins]
        return concatenated(
            [
                self._workers.submit(*_task(prompts[batch]), torch.tensor(images[batch]), prompts[batch])
                for batch in batches
            ]
        )

    def describe_cuts(self, prompts: Sequence[Prompt]) -> list[str]:
        """See `WeightedSum.describe_cuts`."""
        plain = [replace(prompt, images=(), metadata={}) for prompt in prompts]
        (told,) = self._workers.submit("the length of prompts on", "describe_cuts", plain).result().values
        return list(told)

    def follow(self, shards: Sequence[Future[Answer]], prompts: Sequence[list[Prompt]]) -> Reward:
        """Score each shard of a rollout as soon as it is sampled.

        Args:
            shards: the answer to each shard: a rollout, and its images as the second value.
            prompts: for each shard, one prompt an image.

        Returns:
            The reward to call with all samples of the rollout, in order.
        """
        scores = [
            self._workers.submit_after(shard, *_task(shard_prompts), partial(_of_images, shard_prompts))
            for shard, shard_prompts in zip(shards, prompts, strict=True)
        ]
        return _PendingReward(self, scores, sum(map(len, prompts)))

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started here."""
        self._workers.close()


class _PendingReward:
    """The reward of samples that workers are already scoring.

    The first call waits for these scores, if it is for all samples. Other calls score anew: `score_batch` calls with
    single samples after a failure, and without the samples that have no picture.
    """

    def __init__(self, reward: RayReward, scores: list[Future[Answer]], num_samples: int) -> None:
        self.name = reward.name
        self._reward = reward
        self._num_samples = num_samples
        self.scores = scores

    def __call__(self, images: ImageArray, prompts: list[Prompt]) -> RewardOutput:
        scores, self.scores = self.scores, []
        if scores and len(prompts) == self._num_samples:
            return concatenated(scores)
        return self._reward(images, prompts)


class RewardWorker:
    """The worker's side: the whole reward of a recipe."""

    def __init__(self, terms: Sequence[RewardTerm], gold: Sequence[RewardTerm]) -> None:
        self._reward = build_reward(terms, gold)

    def name(self) -> str:
        """The reward's name in messages."""
        return reward_name(self._reward)

    def describe_cuts(self, prompts: list[Prompt]) -> list[str]:
        """See `WeightedSum.describe_cuts`."""
        return self._reward.describe_cuts(prompts)

    def score(self, images: Images, prompts: list[Prompt]) -> RewardOutput:
        """Score images."""
        return as_reward_output(self._reward(images.numpy(), prompts), len(prompts), self.name())


def concatenated(scores: Sequence[Future[Answer]]) -> RewardOutput:
    """Wait for the scores of all batches and concatenate them."""
    return RewardOutput.concatenate([score.result().values[0] for score in scores])


def _task(prompts: list[Prompt]) -> tuple[str, str]:
    """Label and method of a task."""
    return f"scoring of {len(prompts)} images from prompt {prompts[0].text!r} on", "score"


def _of_images(prompts: list[Prompt], shard: Answer) -> tuple[Any, list[Prompt]]:
    """The arguments of a task that scores a sampled shard."""
    return shard.references[1], prompts
