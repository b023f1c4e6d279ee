"""A training step, and once more without the rollout workers that alone show a fault."""

from __future__ import annotations

from collections.abc import Callable

from flowcorr.errors import RolloutFault
from flowcorr.trainer.collect import prefetch
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.step import StepResult, train_step
from flowcorr.workers.rollout import RayRollout


def attempt(run: TrainingRun, step: int, on_phase: Callable[[str], None]) -> StepResult:
    """Do a training step; without the rollout workers that alone show a fault, if others are left.

    Raises:
        RolloutFault: what was measured proves a fault, see `trainer.on_fault`.
    """
    position = run.prompts.position
    while True:
        prefetch(run, step)
        try:
            return train_step(run, step, on_phase)
        except RolloutFault as fault:
            if not take_out(run, fault):
                raise
            run.prompts.position = position


def take_out(run: TrainingRun, fault: RolloutFault) -> bool:
    """Take out the workers of a fault, and drop all samples in flight, of which they may have sampled some.

    Returns:
        Whether the training step can be sampled again: there were such workers, and others are left.
    """
    if fault.by_worker is None or not isinstance(run.engine, RayRollout):
        return False
    faulty, fault.by_worker = fault.by_worker(fault), None
    if not faulty:
        return False
    reasons = {
        worker: f"its samples of training step {fault.step} prove a fault, {findings[0].cause}: {findings[0].text} "
        f"({findings[0].evidence})"
        for worker, findings in faulty.items()
    }
    if not run.engine.retire(reasons):
        return False
    run.in_flight.clear()
    return True
