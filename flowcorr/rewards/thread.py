"""Rewards in a thread of their own: some images are scored while others are still sampled."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from flowcorr.records import ImageArray, Images, Prompt
from flowcorr.rewards.base import Reward, RewardOutput
from flowcorr.rewards.combine import WeightedSum

_Call = tuple[Future[RewardOutput], ImageArray, list[Prompt]]  # the scores to come, and the batch

MAX_WAITING = 32  # calls that wait for the thread; with more, sampling waits
CLOSE_TIMEOUT = 5.0  # seconds that the end of a run waits for the call that is being computed


class ThreadReward:
    """A `Reward` that computes another one in its own thread.

    Other work goes on while the reward releases Python's interpreter lock, as onnxruntime, PIL and HTTP do.

    Args:
        reward: the reward that the thread computes.
    """

    def __init__(self, reward: WeightedSum) -> None:
        self.name = reward.name
        self._reward = reward
        self._calls: queue.Queue[_Call | None] = queue.Queue(MAX_WAITING)
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # A daemon, so that a reward that hangs cannot keep an interrupted process alive.
        self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
        self._thread.start()

    def __call__(self, images: ImageArray, prompts: list[Prompt]) -> RewardOutput:
        """Score images in one call, and wait for the scores."""
        return self.submit(images, prompts).result()

    def describe_cuts(self, prompts: Sequence[Prompt]) -> list[str]:
        """See `WeightedSum.describe_cuts`; computed in the caller's thread."""
        return self._reward.describe_cuts(prompts)

    def submit(self, images: ImageArray, prompts: list[Prompt]) -> Future[RewardOutput]:
        """Queue images for scoring in one call; calls run in the order of submission."""
        scores: Future[RewardOutput] = Future()
        self._calls.put((scores, images, prompts))
        return scores

    def close(self) -> None:
        """End the thread, and cancel queued calls."""
        with contextlib.suppress(queue.Empty):
            while (call := self._calls.get_nowait()) is not None:
                scores, _, _ = call
                scores.cancel()
        self._calls.put(None)
        self._thread.join(CLOSE_TIMEOUT)

    def _work(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # each thread begins with the first GPU, whatever this rank's is
        while (call := self._calls.get()) is not None:
            scores, images, prompts = call
            if not scores.set_running_or_notify_cancel():
                continue
            try:
                scores.set_result(self._reward(images, prompts))
            except BaseException as error:
                scores.set_exception(error)  # for the trainer's thread


class ScoredAhead:
    """A reward that scores images as they are decoded; `score_batch` calls it like any other.

    The first call waits for the scores. If a part failed, all images are scored again by one call, so that failures and
    their messages are the same as for a reward in the trainer's own thread.

    Args:
        reward: scores the images.
        prompts: of all samples.
    """

    def __init__(self, reward: ThreadReward, prompts: list[Prompt]) -> None:
        self.name = reward.name
        self._reward, self._prompts = reward, prompts
        self._num_samples = len(prompts)
        self._scores: list[Future[RewardOutput]] = []

    def add(self, images: Images) -> None:
        """Begin to score the next images; images beyond the number of prompts are left out."""
        prompts, self._prompts = self._prompts[: len(images)], self._prompts[len(images) :]
        if prompts:
            self._scores.append(self._reward.submit(images[: len(prompts)].cpu().numpy(), prompts))

    def __call__(self, images: ImageArray, prompts: list[Prompt]) -> RewardOutput:
        """Return the scores that were computed ahead if `images` are all samples; otherwise score the images now.

        So if a sample has no picture, the others are scored again.
        """
        scores, self._scores = self._scores, []
        if scores and len(prompts) == self._num_samples:
            with contextlib.suppress(Exception):  # raised again below, by one call for all images
                return RewardOutput.concatenate([score.result() for score in scores])
        for score in scores:
            score.cancel()
        return self._reward(images, prompts)


def scored_ahead(reward: Reward, prompts: list[Prompt]) -> tuple[Reward, Callable[[Images], None]]:
    """The reward for `prompts`, and a callback that receives images as they are decoded."""
    if not isinstance(reward, ThreadReward):
        return reward, lambda images: None
    ahead = ScoredAhead(reward, prompts)
    return ahead, ahead.add
