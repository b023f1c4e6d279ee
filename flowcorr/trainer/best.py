"""Finds the best evaluation of a run, by `trainer.best_metric`, so that its checkpoint is kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from flowcorr.config.run import TrainerConfig
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.trainer import checkpoint, run_folder
from flowcorr.trainer.checkpoint import TrainingState

logger = logging.getLogger(__name__)

Best = tuple[int, float]
"""The step of an evaluation and its score."""


def best_so_far(best: Best | None, name: str, step: int, metrics: Mapping[str, float]) -> Best | None:
    """The best evaluation up to `step`.

    Args:
        best: the best one before; None if there is none.
        name: `trainer.best_metric`.
        step: the training steps done.
        metrics: the evaluation after them.

    Raises:
        ConfigError: the first evaluation of a run does not yield `name`. Of a later one, that is a warning.
    """
    if name not in metrics:
        if step == 0:
            raise ConfigError(unknown_choice("trainer.best_metric", name, sorted(metrics)))
        logger.warning(
            "the evaluation at step %d has no %s (trainer.best_metric), so it cannot be the best", step, name
        )
        return best
    return (step, metrics[name]) if best is None or metrics[name] > best[1] else best


def best_checkpoint(folder: Path, trainer: TrainerConfig, state: TrainingState) -> Best | None:
    """Step and score of the best checkpoint of a resumed run; None if there is none yet.

    If `trainer.best_metric` has changed, or the best checkpoint is gone, it is the best by `metrics.jsonl` of the
    checkpoints that exist. A warning names it, and the earlier best checkpoint, which is no longer kept.

    Args:
        folder: the run's folder.
        trainer: the keys of the resumed run.
        state: the checkpoint that the run is resumed from.
    """
    earlier_metric, earlier = state.facts["config"]["trainer"]["best_metric"], state.facts["best"]
    steps = {step for step in checkpoint.steps(folder / run_folder.CHECKPOINTS) if step <= state.step}
    changed = trainer.best_metric != earlier_metric
    if not changed and (earlier is None or earlier[0] in steps):
        return None if earlier is None else (earlier[0], earlier[1])
    scores = [(record["step"], record.get(trainer.best_metric)) for record in run_folder.metrics_of(folder)]
    known = [(step, score) for step, score in scores if step in steps and score is not None]
    best = max(known, key=lambda pair: pair[1], default=None)
    fallback = (
        "no checkpoint has a score of it, so the next evaluation is the best"
        if best is None
        else f"the best checkpoint is that of step {best[0]}, with {best[1]:.4g}"
    )
    if not changed:
        reason = f"the checkpoint of step {earlier[0]}, the best by {earlier_metric}, is gone"
    else:
        reason = f"trainer.best_metric was {earlier_metric} and is now {trainer.best_metric}"
        if earlier is not None and (best is None or earlier[0] != best[0]):
            fallback += f"; that of step {earlier[0]}, the best by {earlier_metric}, is no longer kept"
    logger.warning("%s: %s", reason, fallback)
    return best
