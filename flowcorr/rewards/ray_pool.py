"""Rewards in Ray workers: a share of the images is scored as soon as it is sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from flowcorr.config.schema import RewardConfig, RewardTerm
from flowcorr.ray_workers import Answer, OnEvent, WorkerPool, ignore_event
from flowcorr.records import Prompt
from flowcorr.rewards.base import Reward, RewardOutput, as_reward_output, reward_name
from flowcorr.rewards.combine import build_reward

IMAGES_AT_A_TIME = 16  # what a worker is given where images come all at once, however many workers there are


class RayReward:
    """A recipe's reward, computed by workers; itself a `Reward`, with which `score_batch` means what it always does.

    Args:
        config: the reward and its workers.
        address: see `flowcorr.ray_cluster.Cluster`.
        num_threads: CPU threads of torch in a worker; None leaves torch's own choice.
        on_event: told of workers that are lost and replaced.

    Raises:
        ConfigError, MissingExtraError: as `build_reward`, from the workers; or they do not fit the cluster.
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
            "reward",
            partial(RewardWorker, config.terms, config.gold),
            num_workers=config.num_workers,
            resources=config.worker_resources,
            timeout=config.timeout,
            address=address,
            num_threads=num_threads,
            own_errors=(Exception,),  # `score_batch` decides what a reward's failure means
            on_event=on_event,
        )
        try:
            (self.name,) = self._workers.submit("the reward's name", "name").result().values
        except BaseException:
            self.close()
            raise

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        """Score images `[B, H, W, 3]` uint8, a few at a time.

        Raises:
            Exception: what the reward raised, or `BackendError` where workers were lost time and again.
        """
        import torch

        begins = range(0, len(prompts), IMAGES_AT_A_TIME)
        parts = [slice(begin, begin + IMAGES_AT_A_TIME) for begin in begins]
        return joined([self._submit(torch.tensor(images[part]), prompts[part]) for part in parts])

    def follow(self, shards: Sequence[Future[Answer]], prompts: Sequence[list[Prompt]]) -> Reward:
        """Score each shard of a rollout when it is there.

        Args:
            shards: their answers, of which the second value is the images.
            prompts: one for each image, by shard.

        Returns:
            The reward of exactly these samples together.
        """
        scores: list[Future[Answer]] = []
        for shard, asked in zip(shards, prompts, strict=True):
            score: Future[Answer] = Future()
            shard.add_done_callback(partial(self._score_sampled, asked, score))
            scores.append(score)
        return _Begun(self, scores)

    @property
    def places(self) -> list[Mapping[str, Any]]:
        """Node and process of each worker."""
        return self._workers.places

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started here."""
        self._workers.close()

    def _score_sampled(self, prompts: list[Prompt], score: Future[Answer], shard: Future[Answer]) -> None:
        if shard.cancelled() or shard.exception() is not None:
            score.cancel()  # nobody will ask for it
        else:
            self._submit(shard.result().references[1], prompts, score)

    def _submit(
        self, images: Any, prompts: list[Prompt], score: Future[Answer] | None = None
    ) -> Future[Answer]:
        label = f"scoring of {len(prompts)} images from prompt {prompts[0].text!r} on"
        return self._workers.submit(label, "score", images, prompts, future=score)


class _Begun:
    """The reward of samples whose scoring has begun; asked for single ones of them, it scores them anew."""

    def __init__(self, reward: RayReward, scores: list[Future[Answer]]) -> None:
        self.name = reward.name
        self._reward = reward
        self._scores = scores

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        scores, self._scores = self._scores, []
        return joined(scores) if scores else self._reward(images, prompts)


class RewardWorker:
    """The whole reward of a recipe."""

    def __init__(self, terms: Sequence[RewardTerm], gold: Sequence[RewardTerm]) -> None:
        self._reward = build_reward(terms, gold)

    def name(self) -> str:
        """What it is called in messages."""
        return reward_name(self._reward)

    def score(self, images: Tensor, prompts: list[Prompt]) -> RewardOutput:
        """Score images `[b, H, W, 3]` uint8."""
        return as_reward_output(self._reward(images.numpy(), prompts), len(prompts), self.name())


def joined(scores: Sequence[Future[Answer]]) -> RewardOutput:
    """Wait for the scores of parts, and put them together in order; NaN where a part lacks an extra or a term."""
    outputs: list[RewardOutput] = [score.result().values[0] for score in scores]
    ends = np.cumsum([len(output.scores) for output in outputs])
    errors = {
        int(end) - len(output.scores) + index: error
        for output, end in zip(outputs, ends, strict=True)
        for index, error in output.errors.items()
    }
    return RewardOutput(
        scores=np.concatenate([output.scores for output in outputs]),
        extra=_joined([output.extra for output in outputs], [len(output.scores) for output in outputs]),
        terms=_joined([output.terms for output in outputs], [len(output.scores) for output in outputs]),
        errors=errors,
    )


def _joined(parts: Sequence[Mapping[str, np.ndarray]], sizes: Sequence[int]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: np.concatenate(
            [part.get(name, np.full(size, np.nan)) for part, size in zip(parts, sizes, strict=True)]
        )
        for name in names
    }
