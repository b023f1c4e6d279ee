"""The state of a training run: captured for a checkpoint, and restored from one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from flowcorr import config as configs
from flowcorr import distributed
from flowcorr.actor.adamw import scheduled_lr
from flowcorr.actor.weights import TrainedWeights
from flowcorr.config.schema import Config
from flowcorr.distributed import fsdp
from flowcorr.errors import CheckpointError, ConfigError
from flowcorr.private import redact
from flowcorr.rollout import Weights
from flowcorr.trainer.checkpoint import TrainingState
from flowcorr.trainer.run import TrainingRun

logger = logging.getLogger(__name__)


def capture(
    run: TrainingRun,
    *,
    step: int,
    best: tuple[int, float] | None,
    unlogged: Mapping[str, float] | None = None,
) -> TrainingState:
    """The state of a run after `step` training steps, the same on any number of ranks.

    Every rank has to call: trained shards are gathered on the main rank.

    Args:
        run: the training run.
        step: training steps done.
        best: step and score of the best evaluation so far.
        unlogged: the metrics of the last step, if its record is not complete and has to be logged again.
    """
    actor, history = run.actor, run.engine.history
    groups: dict[str, Mapping[str, Tensor]] = {
        "weights": actor.weights.snapshot().tensors,
        "optimizer": actor.optimizer.adamw.state(),
        "ema": actor.weights.average or {},
        "loss_scale": actor.optimizer.loss_scale.state(),
        "auto_mode": run.mode.state(),
        "residuals": run.residuals.state(),
        "bands": actor.optimizer.bands.state(),
    }
    groups |= {f"history_{place}": weights.tensors for place, weights in enumerate(history[:-1])}
    tensors = {f"{group}/{name}": value for group, part in groups.items() for name, value in part.items()}
    exports = distributed.is_main() or actor.weights.trains_shards  # which need a call on all ranks
    return TrainingState(
        step=step,
        tensors=fsdp.gathered(tensors),
        exported=actor.weights.exported() if exports else {},
        facts={
            "version": actor.weights.version,
            "pass_rows": actor.scorer.rows,
            "data_position": run.prompts.position,
            "prompts": run.prompts_digest,
            "best": best,
            "unlogged": unlogged,
            "history_versions": [weights.version for weights in history],
            "config": redact(configs.to_mapping(run.config)),
        },
    )


def restore(run: TrainingRun, folder: Path, state: TrainingState) -> None:
    """Restore a training run from the state in checkpoint `folder`.

    Raises:
        CheckpointError: the checkpoint belongs to another model or adapter, or other prompts.
        ConfigError: the run has more steps already than `trainer.total_steps`.
    """
    if run.config.trainer.total_steps < state.step:
        raise ConfigError(
            f"trainer.total_steps={run.config.trainer.total_steps} is below the {state.step} steps that the run has "
            f"taken; give {state.step} or more"
        )
    if run.prompts_digest != state.facts["prompts"]:
        data = run.config.data
        raise CheckpointError(
            f"the prompts of data.path={data.path!r} or data.heldout_path={data.heldout_path!r} are not those that the "
            f"run of {folder} began with; put the files back, or begin another run with --out"
        )
    actor, optimizer = run.actor, run.actor.optimizer
    restore_weights(actor.weights, folder, state)
    optimizer.adamw.load_state(state.group("optimizer"))
    optimizer.loss_scale.load_state(state.group("loss_scale"))
    optimizer.bands.restore(state.group("bands"))
    actor.scorer.rows = state.facts["pass_rows"]
    older = [
        Weights(version=version, tensors=actor.weights.like_parameters(state.group(f"history_{place}")))
        for place, version in enumerate(state.facts["history_versions"][:-1])
    ]
    run.engine.restore([*older, actor.weights.for_engine()])
    run.mode.restore(state.group("auto_mode"))
    run.residuals.restore(state.group("residuals"))
    run.prompts.position = state.facts["data_position"]


def restore_weights(weights: TrainedWeights, folder: Path, state: TrainingState) -> None:
    """Restore weights and their average from the state in checkpoint `folder`: all that an evaluation needs.

    Raises:
        CheckpointError: the checkpoint belongs to another model or adapter.
    """
    try:
        weights.load(state.group("weights"))
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder} does not fit this run: {error}") from error
    if weights.average is not None:
        weights.average = weights.like_parameters(state.group("ema"))
    weights.version = state.facts["version"]


def warn_of_another_schedule(config: Config, state: TrainingState) -> None:
    """Warn if `trainer.total_steps` has changed, over which `actor.lr_schedule` lets the learning rate fall.

    Args:
        config: that of the resumed run.
        state: the checkpoint that the run is resumed from.
    """
    actor = config.actor
    earlier, now = state.facts["config"]["trainer"]["total_steps"], config.trainer.total_steps
    if actor.lr_schedule == "constant" or earlier == now:
        return
    before, after = (
        scheduled_lr(actor, state.facts["version"], steps * actor.epochs * actor.mini_batches)
        for steps in (earlier, now)
    )
    logger.warning(
        "trainer.total_steps was %d and is now %d, and actor.lr_schedule=%s falls over all steps: the learning rate "
        "goes on at %.3g, not at %.3g",
        earlier,
        now,
        actor.lr_schedule,
        after,
        before,
    )
