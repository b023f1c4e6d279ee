from .evaluate import evaluate_run
from .export import export_run
from .loop import train
from .observer import Observer, RunResult, Silent
from .run import TrainingRun
from .step import StepResult, train_step

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
