"""The observer of a run, such as the terminal, and the result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from flowcorr.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        status: `interrupted` after a signal, whose number is `signal`.
        step: training steps done.
        out_dir: the run's folder.
        metrics: the last evaluation.
        resume_command: the shell command that resumes an interrupted run.
    """

    status: Literal["finished", "interrupted"]
    step: int
    out_dir: Path
    metrics: Mapping[str, float]
    signal: int | None = None
    resume_command: str | None = None


class Observer(Protocol):
    """Gets a call for each stage of a run."""

    def on_start(self, config: Config, out_dir: Path, start_step: int) -> None: ...
    def on_phase(self, name: str) -> None: ...
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_message(self, text: str) -> None: ...
    def on_finish(self, result: RunResult) -> None: ...


class Silent:
    """Does nothing; a base class for observers of only some stages."""

    def on_start(self, config: Config, out_dir: Path, start_step: int) -> None: ...
    def on_phase(self, name: str) -> None: ...
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_message(self, text: str) -> None: ...
    def on_finish(self, result: RunResult) -> None: ...
