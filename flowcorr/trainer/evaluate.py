"""Held-out evaluation: the ODE sampler from fixed noise, scored by the run's reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flowcorr import distributed, sde
from flowcorr.errors import BatchError, CheckpointError, ConfigError, unknown_choice
from flowcorr.fsdp import all_done
from flowcorr.records import Prompt
from flowcorr.rewards import score_batch
from flowcorr.rollout import decode, sample_ode
from flowcorr.trainer import checkpoint, run_folder
from flowcorr.trainer.checkpoint import TrainingState
from flowcorr.trainer.setup import build_parts
from flowcorr.trainer.state import restore_actor
from flowcorr.trainer.step import Parts

BATCH_SIZE = 64  # images at a time, or fewer where `rollout.batch_size` says so
_NOISE_SEED = 20_240_501


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """One evaluation: `metrics` named `eval/...`, `images` `[B, H, W, 3]` uint8 and their `scores` `[B]`.

    Every rank has all scores; a rank other than the main one has no images but its own.
    """

    metrics: dict[str, float]
    images: np.ndarray
    scores: np.ndarray


@torch.no_grad()
def evaluate(parts: Parts, prompts: Sequence[Prompt]) -> Evaluation:
    """Sample one image a held-out prompt and score it, each rank its share.

    The noise depends on a prompt's place alone, so that evaluations of all runs and steps, and on any number of ranks,
    are paired.

    Raises:
        BatchError: the model's latents are not finite.
        BackendError: the reward failed on a sample, whatever `reward.on_error` says of training.
    """
    share = distributed.share(len(prompts))
    # Sharded weights need as many forward passes on every rank: one with fewer prompts draws the first as well.
    size = math.ceil(len(prompts) / distributed.world_size())
    places = [*share, *[0] * (size - len(share))]
    mine: dict[str, np.ndarray] = {}
    with distributed.together("an evaluation"):
        with parts.actor.averaged():
            step = min(BATCH_SIZE, parts.config.rollout.batch_size or BATCH_SIZE)
            batches = [places[begin : begin + step] for begin in range(0, size, step)]
            drawn = np.concatenate(all_done(partial(_sample, parts, prompts, batch) for batch in batches))[
                : len(share)
            ]
        if share:
            output, _ = score_batch(parts.reward, drawn, [prompts[place] for place in share])
            mine = {"reward": output.scores, **output.extra}
    shares = [scores for scores in distributed.gather(mine, "the scores of an evaluation") if scores]
    images = distributed.gather_on_main(drawn, "the images of an evaluation")
    scores = {name: np.concatenate([part[name] for part in shares]) for name in shares[0]}
    metrics = {f"eval/{name}": float(values.mean()) for name, values in scores.items()}
    metrics["eval/reward_std"] = float(scores["reward"].std(ddof=1)) if len(prompts) > 1 else 0.0
    return Evaluation(
        metrics=metrics,
        images=drawn if images is None else np.concatenate(images),
        scores=scores["reward"],
    )


def check_best_metric(name: str, metrics: Mapping[str, float]) -> None:
    """Check that an evaluation yields the metric that `trainer.best_metric` names."""
    if name not in metrics:
        raise ConfigError(unknown_choice("trainer.best_metric", name, sorted(metrics)))


def evaluate_run(
    run_dir: str | Path, *, which: str = "best", overrides: tuple[str, ...] = ()
) -> tuple[Path, Evaluation]:
    """Evaluate a run's `best` or `last` checkpoint, or one given by its folder, on held-out prompts.

    Raises:
        ConfigError: `run_dir` holds no run.
        CheckpointError: the checkpoint is missing, damaged or does not fit.
    """
    folder = Path(run_dir)
    config = run_folder.load_config(folder, overrides)
    chosen, state = _choose(folder / run_folder.CHECKPOINTS, which)
    # Nothing is rolled out: let the engine share the actor's weights.
    rollout = replace(
        config.rollout,
        name="in_process",
        engine={},
        placement="local",
        dtype=config.model.dtype,
        emulate="none",
        staleness=0,
        max_staleness=0,
    )
    reward = replace(config.reward, placement="local")
    parts, data = build_parts(replace(config, rollout=rollout, reward=reward))
    restore_actor(parts.actor, chosen, state)
    return chosen, evaluate(parts, data.heldout)


def _sample(parts: Parts, prompts: Sequence[Prompt], places: Sequence[int]) -> np.ndarray:
    """Images `[b, H, W, 3]` uint8 of the prompts at `places`."""
    actor, config = parts.actor, parts.config
    family = actor.family
    shape = family.latent_shape(config.sampling.height, config.sampling.width)
    steps = config.trainer.eval_num_inference_steps or config.sampling.num_inference_steps
    conditioning = parts.cache([prompts[place].text for place in places])
    noise = sde.initial_noise(shape, places, [0] * len(places), seed=_NOISE_SEED, training_step=0)

    def velocity(latents: Tensor, timesteps: Tensor) -> Tensor:
        return family.velocity(actor.transformer, latents, timesteps, conditioning, actor.guidance)

    final = sample_ode(velocity, noise.to(actor.device), family.schedule(steps, shape))
    if not torch.isfinite(final).all():
        raise BatchError(
            "the evaluation's latents are not finite: the weights have diverged, or model.path is damaged; "
            "lower actor.lr, or check the model's files"
        )
    return decode(family, final).cpu().numpy()


def _choose(root: Path, which: str) -> tuple[Path, TrainingState]:
    if which not in ("best", "last"):
        folder = Path(which)
        if not folder.is_dir():
            raise CheckpointError(
                f"checkpoint={which!r} is no folder; give best, last or a checkpoint's folder"
            )
        return folder, checkpoint.load(folder)
    folder, state = checkpoint.load_latest(root)
    if which == "last" or state.facts["best"] is None:
        return folder, state
    best = checkpoint.folder_of(root, state.facts["best"][0])
    return best, checkpoint.load(best)
