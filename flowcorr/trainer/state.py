"""What a checkpoint remembers of a run, taken from its parts and put back into them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flowcorr import config as configs
from flowcorr import fsdp
from flowcorr.actor import DiffusionActor
from flowcorr.algorithm import ClipCenter
from flowcorr.errors import CheckpointError
from flowcorr.rollout import Weights
from flowcorr.trackers import redact
from flowcorr.trainer.checkpoint import TrainingState
from flowcorr.trainer.step import Parts


def capture(
    parts: Parts,
    *,
    step: int,
    best: tuple[int, float] | None,
    unevaluated: Mapping[str, float] | None = None,
) -> TrainingState:
    """The state of a run after `step` training steps, the same on any number of ranks.

    Sharded weights are collected on the main rank, for which every rank has to call.

    Args:
        parts: the run's parts.
        step: training steps done.
        best: step and score of the best evaluation so far.
        unevaluated: metrics of that step, if its evaluation failed and is still to be done.
    """
    actor, history = parts.actor, parts.engine.history
    groups: dict[str, Mapping[str, Tensor]] = {
        "weights": actor.snapshot().tensors,
        "optimizer": actor.optimizer_state(),
        "ema": actor.ema or {},
        "clip_center": {} if actor.clip_center is None else {"sums": actor.clip_center.sums},
        "auto_mode": parts.mode.state(),
        "rng": {"cpu": torch.get_rng_state()},
    }
    groups |= {f"history_{place}": weights.tensors for place, weights in enumerate(history[:-1])}
    tensors = {f"{group}/{name}": value for group, part in groups.items() for name, value in part.items()}
    return TrainingState(
        step=step,
        tensors=fsdp.collected(tensors),
        facts={
            "version": actor.version,
            "data_position": parts.prompts.position,
            "best": best,
            "unevaluated": unevaluated,
            "history_versions": [weights.version for weights in history],
            "config": redact(configs.to_mapping(parts.config)),
        },
    )


def restore(parts: Parts, folder: Path, state: TrainingState) -> None:
    """Put the state of checkpoint `folder` into the parts of a run.

    Raises:
        CheckpointError: the checkpoint belongs to another model or adapter.
    """
    actor = parts.actor
    restore_actor(actor, folder, state)
    older = [
        Weights(version=version, tensors=actor.laid_out(state.group(f"history_{place}")))
        for place, version in enumerate(state.facts["history_versions"][:-1])
    ]
    parts.engine.restore([*older, actor.snapshot()])
    parts.mode.restore(state.group("auto_mode"))
    parts.prompts.position = state.facts["data_position"]
    torch.set_rng_state(state.tensors["rng/cpu"])


def restore_actor(actor: DiffusionActor, folder: Path, state: TrainingState) -> None:
    """Put a checkpoint's weights, optimizer and average into `actor`.

    Raises:
        CheckpointError: the checkpoint belongs to another model or adapter.
    """
    try:
        actor.load_weights(state.group("weights"))
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder} does not fit this run: {error}") from error
    actor.load_optimizer_state(state.group("optimizer"))
    if actor.ema is not None:
        actor.ema = actor.laid_out(state.group("ema"))
    center = state.group("clip_center")
    if actor.clip_center is not None and center:
        actor.clip_center = ClipCenter(sums=center["sums"].to(actor.device))
    actor.version = state.facts["version"]
