"""What a checkpoint remembers of a run, taken from its parts and put back into them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flowcorr import config as configs
from flowcorr.actor import DiffusionActor
from flowcorr.errors import CheckpointError
from flowcorr.rollout import Weights
from flowcorr.trackers import redact
from flowcorr.trainer.checkpoint import TrainingState
from flowcorr.trainer.step import Parts


def capture(parts: Parts, *, step: int, best: tuple[int, float] | None) -> TrainingState:
    """The state of a run after `step` training steps.

    Args:
        parts: the run's parts.
        step: training steps done.
        best: step and score of the best evaluation so far.
    """
    actor, history = parts.actor, parts.engine.history
    groups: dict[str, Mapping[str, Tensor]] = {
        "weights": actor.snapshot().tensors,
        "optimizer": actor.optimizer_state(),
        "ema": actor.ema or {},
        "rng": {"cpu": torch.get_rng_state()},
    }
    groups |= {f"history_{place}": weights.tensors for place, weights in enumerate(history[:-1])}
    return TrainingState(
        step=step,
        tensors={f"{group}/{name}": value for group, part in groups.items() for name, value in part.items()},
        facts={
            "version": actor.version,
            "data_position": parts.prompts.position,
            "best": best,
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
        Weights(version=version, tensors=_on_device(state.group(f"history_{place}"), actor.device))
        for place, version in enumerate(state.facts["history_versions"][:-1])
    ]
    parts.engine.restore([*older, actor.snapshot()])
    parts.prompts.position = state.facts["data_position"]
    torch.set_rng_state(state.tensors["rng/cpu"])


def restore_actor(actor: DiffusionActor, folder: Path, state: TrainingState) -> None:
    """Put a checkpoint's weights, optimizer and average into `actor`.

    Raises:
        CheckpointError: the checkpoint belongs to another model or adapter.
    """
    device = actor.device
    try:
        actor.load_weights(_on_device(state.group("weights"), device))
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder} does not fit this run: {error}") from error
    actor.load_optimizer_state(_on_device(state.group("optimizer"), device))
    if actor.ema is not None:
        actor.ema = _on_device(state.group("ema"), device)
    actor.version = state.facts["version"]


def _on_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
