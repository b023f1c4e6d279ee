"""`flowcorr.train`: training from Python. A notebook shows its progress and its result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from rich.console import Console

from flowcorr import trainer
from flowcorr.config.schema import Config
from flowcorr.instruments.progress import TerminalObserver
from flowcorr.instruments.report import report
from flowcorr.instruments.web_page import framed
from flowcorr.trainer import Observer, RunResult, TrainingRun


class ShownRun(RunResult):
    """How a run ended; a notebook shows the first screen of its report."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return framed(replace(report([self.out_dir]), charts=()))


def train(
    config: Config,
    out_dir: str | Path,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    before_start: Callable[[TrainingRun], None] | None = None,
) -> ShownRun:
    """Train like `flowcorr.trainer.train`, with the same arguments and errors.

    Without an `observer`, a notebook prints a line for each step, and any other program prints nothing.
    """
    with contextlib.ExitStack() as resources:
        if observer is None and Console().is_jupyter:
            console = Console(force_jupyter=False, force_terminal=False, highlight=False)
            observer = resources.enter_context(TerminalObserver(console))
        result = trainer.train(config, out_dir, resume=resume, observer=observer, before_start=before_start)
    return ShownRun(**{entry.name: getattr(result, entry.name) for entry in fields(result)})
