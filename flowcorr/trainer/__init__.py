"""Training runs."""

from flowcorr.trainer.loop import Observer, RunResult, evaluate_run, train
from flowcorr.trainer.step import Parts, StepResult, train_step

__all__ = ["Observer", "Parts", "RunResult", "StepResult", "evaluate_run", "train", "train_step"]
