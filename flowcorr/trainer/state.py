"""The state of a training run: captured for a checkpoint, and restored from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flowcorr import config as configs
from flowcorr.actor import DiffusionActor
from flowcorr.distributed import fsdp
from flowcorr.errors import CheckpointError
from flowcorr.private import redact
from flowcorr.rollout import Weights
from flowcorr.trainer.checkpoint import TrainingState
from flowcorr.trainer.run import TrainingRun


def capture(
    run: TrainingRun,
    *,
    step: int,
    best: tuple[int, float] | None,
    unevaluated: Mapping[str, float] | None = None,
) -> TrainingState:
    """The state of a run after `step` training steps, the same on any number of ranks.

    Every rank has to call: trained shards are gathered on the main rank.

    Args:
        run: the training run.
        step: training steps done.
        best: step and score of the best evaluation so far.
        unevaluated: the metrics of the last step, if its evaluation failed and has to be repeated.
    """
    actor, history = run.actor, run.engine.history
    groups: dict[str, Mapping[str, Tensor]] = {
        "weights": actor.weights.snapshot().tensors,
        "optimizer": actor.optimizer.adamw.state(),
        "ema": actor.weights.average or {},
        "loss_scale": actor.optimizer.loss_scale.state(),
        "auto_mode": run.mode.state(),
        "bands": actor.optimizer.bands.state(),
        "rng": {"cpu": torch.get_rng_state()},
    }
    groups |= {f"history_{place}": weights.tensors for place, weights in enumerate(history[:-1])}
    tensors = {f"{group}/{name}": value for group, part in groups.items() for name, value in part.items()}
    return TrainingState(
        step=step,
        tensors=fsdp.gathered(tensors),
        facts={
            "version": actor.weights.version,
            "pass_rows": actor.scorer.rows,
            "data_position": run.prompts.position,
            "best": best,
            "unevaluated": unevaluated,
            "history_versions": [weights.version for weights in history],
            "config": redact(configs.to_mapping(run.config)),
        },
    )


def restore(run: TrainingRun, folder: Path, state: TrainingState) -> None:
    """Restore a training run from the state in checkpoint `folder`.

    Raises:
        CheckpointError: the checkpoint belongs to another model or adapter.
    """
    actor = run.actor
    restore_actor(actor, folder, state)
    older = [
        Weights(version=version, tensors=actor.weights.like_parameters(state.group(f"history_{place}")))
        for place, version in enumerate(state.facts["history_versions"][:-1])
    ]
    run.engine.restore([*older, actor.weights.for_engine()])
    run.mode.restore(state.group("auto_mode"))
    run.prompts.position = state.facts["data_position"]
    torch.set_rng_state(state.tensors["rng/cpu"])


def restore_actor(actor: DiffusionActor, folder: Path, state: TrainingState) -> None:
    """Restore an actor's weights, optimizer and averaged weights from the state in checkpoint `folder`.

    Raises:
        CheckpointError: the checkpoint belongs to another model or adapter.
    """
    try:
        actor.weights.load(state.group("weights"))
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder} does not fit this run: {error}") from error
    actor.optimizer.adamw.load_state(state.group("optimizer"))
    actor.optimizer.loss_scale.load_state(state.group("loss_scale"))
    actor.optimizer.bands.restore(state.group("bands"))
    if actor.weights.average is not None:
        actor.weights.average = actor.weights.like_parameters(state.group("ema"))
    actor.weights.version = state.facts["version"]
    actor.scorer.rows = state.facts.get("pass_rows")  # older checkpoints have none
