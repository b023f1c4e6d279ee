"""Training runs."""

from flowcorr.trainer.evaluate import evaluate_run
from flowcorr.trainer.loop import train
from flowcorr.trainer.observer import Observer, RunResult, Silent
from flowcorr.trainer.ranks import leave_ranks, start_ranks
from flowcorr.trainer.step import Parts, StepResult, train_step

__all__ = [
    "Observer",
    "Parts",
    "RunResult",
    "Silent",
    "StepResult",
    "evaluate_run",
    "leave_ranks",
    "start_ranks",
    "train",
    "train_step",
]
