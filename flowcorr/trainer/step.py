"""One training step on one page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from flowcorr import distributed
from flowcorr.actor import DiffusionActor
from flowcorr.advantages import group_advantages
from flowcorr.algorithm import (
    AutoMode,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
)
from flowcorr.config.schema import Config
from flowcorr.data import PromptStream
from flowcorr.errors import BackendError, BatchError
from flowcorr.metrics import Metrics, maximum, mean, minimum, std, total
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.ray_workers import OnEvent, ignore_event
from flowcorr.records import ActorBatch, Prompt, Rollout
from flowcorr.rewards import Reward, RewardOutput, training_scores
from flowcorr.rewards.ray_pool import RayReward
from flowcorr.rollout import RolloutEngine
from flowcorr.trainer.collect import Pending, collect, prefetch, score
from flowcorr.trainer.drift import measure_drifts, measures_drifts, with_old_scores
from flowcorr.trainer.log_probs import LoggedTerms, TermRecorder
from flowcorr.trainer.timing import Stopwatch


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a training step works with."""

    config: Config
    actor: DiffusionActor
    engine: RolloutEngine
    cache: PromptCache
    prompts: PromptStream
    reward: Reward
    on_event: OnEvent = ignore_event
    in_flight: dict[int, Pending] = field(default_factory=dict)
    mode: AutoMode = field(init=False)

    def __post_init__(self) -> None:
        self.mode = AutoMode.of(self.config)

    def close(self) -> None:
        """End the processes that belong to the parts."""
        self.engine.close()
        if isinstance(self.reward, RayReward):
            self.reward.close()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What a training step leaves for logging: metrics of all ranks, and the rest of this one.

    `images` `[B, H, W, 3]` and `scores` belong to `prompts`.
    """

    metrics: Metrics
    images: np.ndarray
    prompts: list[Prompt]
    scores: np.ndarray
    terms: LoggedTerms | None = None


def train_step(parts: Parts, step: int, on_phase: Callable[[str], None]) -> StepResult:
    """Sample, score, correct, learn: prompts -> rollout -> rewards -> advantages -> correction -> update."""
    config, actor = parts.config, parts.actor
    correction = actor.correction = parts.mode.correction
    watch = Stopwatch(on_phase, actor.device)

    prefetch(parts, step)
    drawn = parts.prompts.next(config.rollout.prompts_per_step)
    groups = distributed.share(len(drawn))
    prompts = [drawn[group] for group in groups for _ in range(config.rollout.n)]
    with distributed.together("the rollout and its rewards"):
        with watch("rollout"):
            collected = collect(parts, drawn, groups, step)
            rollout = collected.rollout
        check_latents(rollout, prompts)
        with watch("reward"):
            assert rollout.images is not None, "an engine's rollout has images"
            images = rollout.images.cpu().numpy()
            scored, failed = score(parts, collected.reward, images, prompts)

    kept = drop_failed_groups(rollout, failed | collected.stale)
    metrics = collected.metrics.merge(_reward_metrics(scored, failed, rollout)).merge(
        Metrics.from_stats({"rollout/num_elements": maximum(rollout.num_elements)})
    )
    rollout = replace(rollout, images=None).select(kept)
    succeeded = scored.map(lambda values: values[kept.cpu().numpy()])
    rewards = training_scores(succeeded, config.reward.terms, rollout.group_ids)
    advantages = group_advantages(rewards, rollout.group_ids, std=config.algorithm.advantage_std)
    batch = ActorBatch(rollout=rollout, advantages=advantages)

    if correction is not None and correction.bypass_mode:
        batch = apply_bypass_mode_to_diffusion_batch(batch)
    else:
        with watch("old_log_prob"):
            batch = with_old_scores(parts, batch)
        if correction is not None:
            with watch("correction"):
                batch, corrected = apply_rollout_correction_to_diffusion_batch(
                    batch,
                    correction,
                    actor_config=config.actor,
                    num_steps=config.sampling.num_inference_steps,
                )
                metrics = metrics.merge(corrected)

    if measures_drifts(config, step):
        with watch("drift"):
            metrics = metrics.merge(measure_drifts(parts, batch))

    recorder = None
    if config.trainer.dump_log_probs:
        bypass = correction is not None and correction.bypass_mode is True
        recorder = TermRecorder(batch, advantages=advantages, rewards=succeeded.scores, bypass=bypass)
    with watch("update"):
        metrics = metrics.merge(actor.update(batch, training_step=step, record=recorder))
    with watch("sync"):
        parts.engine.sync(actor.snapshot())
        prefetch(parts, step + 1)

    metrics = metrics.merge(watch.metrics(num_images=len(drawn) * config.rollout.n)).across_ranks()
    metrics = metrics.merge(parts.mode.observe(metrics))
    terms = recorder.terms() if recorder is not None and rollout.num_samples else None
    return StepResult(metrics=metrics, images=images, prompts=prompts, scores=scored.scores, terms=terms)


def check_latents(rollout: Rollout, prompts: list[Prompt]) -> None:
    """Check the trajectories; a non-finite one would be decoded to an arbitrary image and scored.

    Raises:
        BatchError: latents are not finite; the message names the first such sample.
    """
    bad = (~rollout.latents.isfinite().flatten(1).all(1)).nonzero().squeeze(1).tolist()
    if bad:
        raise BatchError(
            f"the rollout's latents are not finite for sample {bad[0]} (prompt {prompts[bad[0]].text!r}), "
            f"{len(bad)} of {len(prompts)} samples: the weights have diverged, or rollout.dtype overflows; "
            "lower actor.lr, or use another rollout.dtype"
        )


def drop_failed_groups(rollout: Rollout, failed: np.ndarray) -> torch.Tensor:
    """Indices `[B']` of the samples whose group was scored whole; there may be none on one of several ranks.

    Raises:
        BackendError: no group is left on any rank.
    """
    spoiled = rollout.group_ids[torch.as_tensor(failed, device=rollout.group_ids.device)].unique()
    kept = (~torch.isin(rollout.group_ids, spoiled)).nonzero().squeeze(1)
    if not sum(distributed.gather(len(kept), "the rewards that succeeded")):
        raise BackendError("the reward failed on every group of this step, so nothing is left to train on")
    return kept


def _reward_metrics(scored: RewardOutput, failed: np.ndarray, rollout: Rollout) -> Metrics:
    good = scored.scores[~failed]
    groups = rollout.group_ids.cpu().numpy()
    members = [scored.scores[(groups == group) & ~failed] for group in np.unique(groups)]
    flat = sum(int(len(scores) < 2 or np.ptp(scores) == 0) for scores in members)
    metrics = Metrics.from_stats(
        {
            "reward/mean": mean(good.sum(), len(good)),
            "reward/std": std(good.sum(), np.square(good).sum(), len(good)),
            "reward/min": minimum(good.min(initial=math.inf)),
            "reward/max": maximum(good.max(initial=-math.inf)),
            "reward/failed_samples": total(int(failed.sum())),
            "reward/zero_std_group_fraction": mean(flat, len(members)),
        }
    )
    for name, values in scored.extra.items():  # each by itself, as a rank may lack one
        finite = values[np.isfinite(values)]
        metrics = metrics.merge(Metrics.from_stats({f"reward/{name}": mean(finite.sum(), len(finite))}))
    return metrics
