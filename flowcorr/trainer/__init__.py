"""Training runs."""

from flowcorr.trainer.evaluate import evaluate_run
from flowcorr.trainer.export import export_run
from flowcorr.trainer.loop import train
from flowcorr.trainer.observer import Observer, RunResult, Silent
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.step import StepResult, train_step

__all__ = [
    "Observer",
    "RunResult",
    "Silent",
    "StepResult",
    "TrainingRun",
    "evaluate_run",
    "export_run",
    "train",
    "train_step",
]
