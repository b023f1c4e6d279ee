"""Held-out evaluation: the ODE sampler from fixed noise, scored by the run's reward."""

from __future__ import annotations

import contextlib
import logging
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowcorr import distributed, sde
from flowcorr.config.run import SERVED
from flowcorr.errors import BackendError, CheckpointError, ConfigError
from flowcorr.imports import source_of
from flowcorr.records import ImageArray, Prompt
from flowcorr.rewards import Reward, report_broken, score_batch, scored_ahead
from flowcorr.rewards.statistics import image_statistics
from flowcorr.rollout import OnImages, decode, sample_ode
from flowcorr.rollout.base import actor_dtype
from flowcorr.rollout.broken import find_broken
from flowcorr.trainer import checkpoint, run_folder
from flowcorr.trainer.checkpoint import TrainingState
from flowcorr.trainer.images import MAX_PICTURES
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.run_config import imported_by_eval, read_config
from flowcorr.trainer.served import ServedBase
from flowcorr.trainer.setup import build_run
from flowcorr.trainer.state import restore_weights

logger = logging.getLogger(__name__)

_NOISE_SEED = 20_240_501
_FAILED = "failed_samples"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """One evaluation: `metrics` named `eval/...`, the `scores` `[B]` of `B` prompts, and `images` of the first of them.

    A score is NaN where a reward failed. Every rank has all scores. The main rank has `MAX_PICTURES` images, or as many
    as there are, another rank those of its own among them.
    """

    metrics: dict[str, float]
    images: ImageArray
    scores: np.ndarray


@torch.no_grad()
def evaluate(run: TrainingRun, prompts: Sequence[Prompt]) -> Evaluation:
    """Sample one image for each held-out prompt and score it; the ranks share the prompts.

    The noise depends only on a prompt's index, so evaluations of all steps and runs are paired, on any number of ranks.
    The global generators are seeded, for rewards that draw from them.
    With `trainer.eval_on: both`, images and scores are of the trained base, and metrics of both bases. With
    `reward.on_error: drop_group`, images on which a reward failed, or whose latents or pixels are not finite, are left
    out of the means of scores, and counted as `eval/failed_samples`.

    Raises:
        BackendError: an image is not finite, or a reward failed on it, under `reward.on_error: fail`; or that left no
            image for `eval/reward` or `trainer.best_metric` under `drop_group`; or the unquantized base does not fit
            on the device.
    """
    with run.actor.weights.averaged():
        trained = _evaluate(run, prompts, run.actor.weights.transformer)
        if run.config.trainer.eval_on == "trained":
            return trained
        with contextlib.ExitStack() as loaded:
            with distributed.fail_together("loading the unquantized base"):
                run.served = run.served or ServedBase(run.config, run.actor)
                transformer = loaded.enter_context(run.served.on_device())
            served = _evaluate(run, prompts, transformer)
    metrics = {SERVED + name.removeprefix("eval/"): value for name, value in served.metrics.items()}
    return replace(trained, metrics=trained.metrics | metrics)


def _evaluate(run: TrainingRun, prompts: Sequence[Prompt], transformer: Any) -> Evaluation:
    sde.seed_globals(run.config.trainer.seed, "evaluation", distributed.rank())
    own = distributed.local_indices(len(prompts))
    # Sharded weights need equally many forward passes on every rank: a rank with fewer prompts repeats the first.
    size = math.ceil(len(prompts) / distributed.world_size())
    indices = [*own, *[0] * (size - len(own))]
    own_prompts = [prompts[index] for index in own]
    own_scores: dict[str, np.ndarray] = {}
    reward, on_images = scored_ahead(run.reward, own_prompts)
    with distributed.fail_together("an evaluation", has_collectives=run.actor.weights.sharded):
        step = run.config.rollout.evaluation_batch_size
        batches = [indices[begin : begin + step] for begin in range(0, size, step)]
        drawn = [_sample(run, prompts, batch, transformer, on_images) for batch in batches]
        images = np.concatenate([part for part, _, _ in drawn])[: len(own)]
        if own:
            final, finite = (torch.cat(parts)[: len(own)] for parts in list(zip(*drawn, strict=True))[1:])
            model = f"model.dtype={run.config.model.dtype}"
            broken = find_broken([final], finite, samples_in=model, decodes_in=model)
            broken = {place: f"held-out image {own[place]}: {why}" for place, why in broken.items()}
            own_scores = _score(run, reward, images, own_prompts, broken)
    by_rank = [scores for scores in distributed.gather(own_scores, "the scores of an evaluation") if scores]
    # All pixels of a held-out set of videos would fill the main rank's memory.
    images = images[: sum(index < MAX_PICTURES for index in own)]
    gathered = distributed.gather_on_main(images, "the images of an evaluation")
    names = dict.fromkeys(name for scores in by_rank for name in scores)
    scores = {name: np.concatenate([part[name] for part in by_rank if name in part]) for name in names}
    return Evaluation(
        metrics=_metrics(run, scores),
        images=images if gathered is None else np.concatenate(gathered),
        scores=scores["reward"],
    )


def _score(
    run: TrainingRun,
    reward: Reward,
    images: ImageArray,
    prompts: list[Prompt],
    broken: Mapping[int, str],
) -> dict[str, np.ndarray]:
    """Scores and statistics `[b]` of images; a failed sample has NaN for all scores.

    A sample without a picture, named by its place in `broken`, has NaN for all statistics too.
    """
    on_error = run.config.reward.on_error
    report_broken(prompts, broken, on_error)
    output = score_batch(reward, images, prompts, on_error=on_error, broken=broken)
    scores, failed = {"reward": output.scores, **output.extra}, output.failed
    if run.gold is not None:
        gold = score_batch(run.gold, images, prompts, on_error=on_error, broken=broken)
        scores |= gold.extra
        failed |= gold.failed
    scores = {name: np.where(failed, np.nan, values) for name, values in scores.items()}
    statistics = {f"image/{name}": values for name, values in image_statistics(images).items()}
    for values in statistics.values():
        values[list(broken)] = np.nan
    return {**scores, **statistics, _FAILED: failed}


def _metrics(run: TrainingRun, scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The `eval/*` metrics: means over the images that have a score.

    Raises:
        BackendError: failures of a reward leave `eval/reward` or `trainer.best_metric` without a score.
    """
    # A term that does not score a prompt has NaN there, too.
    finite = {name: values[np.isfinite(values)] for name, values in scores.items() if name != _FAILED}
    num_failed, num_images = int(scores[_FAILED].sum()), len(scores[_FAILED])
    best = run.config.trainer.best_metric.removeprefix(SERVED).removeprefix("eval/")
    for name in ("reward", best):
        if num_failed and name in finite and not len(finite[name]):
            raise BackendError(
                f"eval/{name} has no score: {num_failed} of {num_images} held-out images failed, and the log says why; "
                "mend that and resume the run, or give prompts that the reward can score in data.heldout_path "
                "in a new run"
            )
    metrics = {f"eval/{name}": float(values.mean()) for name, values in finite.items() if len(values)}
    metrics["eval/reward_std"] = float(finite["reward"].std(ddof=1)) if len(finite["reward"]) > 1 else 0.0
    metrics["eval/scored_images"] = float(len(finite["reward"]))
    if run.config.reward.on_error == "drop_group":
        metrics[f"eval/{_FAILED}"] = float(num_failed)
    return metrics


def evaluate_run(
    run_dir: str | Path, *, which: str = "best", overrides: tuple[str, ...] = ()
) -> tuple[Path, Evaluation]:
    """Evaluate a run's `best` or `last` checkpoint, or one given by its folder, on held-out prompts.

    This imports the rewards and the model family of the run's own, but not its loss and rejection modes. The log says
    of each which file it is imported from, before that.

    Raises:
        ConfigError: `run_dir` holds no run.
        CheckpointError: the checkpoint is missing, damaged or does not fit.
    """
    folder = Path(run_dir)
    config = read_config(folder, overrides).config
    for key, name in imported_by_eval(config).items():
        logger.warning("%s=%r is imported from %s", key, name, source_of(name) or "nowhere: it is not found")
    chosen, state = choose_checkpoint(folder / run_folder.CHECKPOINTS, which)
    # Nothing is sampled by the engine, so let it share the actor's weights.
    rollout = replace(
        config.rollout,
        name="in_process",
        engine={},
        placement="local",
        dtype=actor_dtype(config),
        emulate="none",
        staleness=0,
        max_staleness=0,
    )
    reward = replace(config.reward, placement="local")
    run, data = build_run(replace(config, rollout=rollout, reward=reward))
    run.actor.scorer.config = config  # guidance is rounded as the run's own engine rounds it
    try:
        restore_weights(run.actor.weights, chosen, state)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {chosen} is damaged: {type(error).__name__}: {error}") from error
    return chosen, evaluate(run, data.heldout)


def _sample(
    run: TrainingRun,
    prompts: Sequence[Prompt],
    indices: Sequence[int],
    transformer: Any,
    on_images: OnImages,
) -> tuple[ImageArray, Tensor, Tensor]:
    """Images of the prompts at `indices`, their latents, and whether their pixels are finite."""
    actor, sampling, trainer = run.actor, run.config.sampling, run.config.trainer
    family = actor.family
    shape = _latent_shape(run)
    steps = trainer.eval_num_inference_steps or sampling.num_inference_steps
    conditioning = run.cache([prompts[index] for index in indices])
    noise = sde.initial_noise(shape, indices, [0] * len(indices), seed=_NOISE_SEED, training_step=0)
    final = sample_ode(
        actor.velocity(conditioning, transformer), noise.to(actor.device), family.schedule(steps, shape)
    )
    images, finite = decode(family, final, on_images)
    return images.cpu().numpy(), final, finite


def _latent_shape(run: TrainingRun) -> tuple[int, ...]:
    sampling, trainer = run.config.sampling, run.config.trainer
    height, width = trainer.eval_height or sampling.height, trainer.eval_width or sampling.width
    try:
        return run.actor.family.sample_shape(height, width, sampling.num_frames)
    except ConfigError as error:
        raise ConfigError(
            f"trainer.eval_height={trainer.eval_height}, trainer.eval_width={trainer.eval_width}: {error}"
        ) from error


def choose_checkpoint(root: Path, which: str) -> tuple[Path, TrainingState]:
    """The `best` or the `last` checkpoint below `root`, or one given by its folder.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if which not in ("best", "last"):
        folder = Path(which)
        if not folder.is_dir():
            raise CheckpointError(
                f"checkpoint={which!r} is not a folder; give best, last or a checkpoint's folder"
            )
        return folder, checkpoint.load(folder)
    folder, state = checkpoint.load_latest(root)
    match state.facts.get("best"):
        case None:
            return folder, state
        case [int(step), _] if step >= 0:
            best = folder if which == "last" else checkpoint.folder_of(root, step)
            return best, state if best == folder else checkpoint.load(best)
        case other:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: best={reprlib.repr(other)} must be a step and its score, or null"
            )
