"""What a run tells those who follow it, and how it ends."""

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
        status: `interrupted` after a signal, which `signal` names.
        step: training steps done.
        out_dir: the run's folder.
        metrics: the last evaluation.
        resume_command: what continues an interrupted run.
    """

    status: Literal["finished", "interrupted"]
    step: int
    out_dir: Path
    metrics: Mapping[str, float]
    signal: int | None = None
    resume_command: str | None = None


class Observer(Protocol):
    """Follows a run, such as a terminal does."""

    def on_start(self, config: Config, out_dir: Path, start_step: int) -> None: ...
    def on_phase(self, name: str) -> None: ...
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_message(self, text: str) -> None: ...
    def on_finish(self, result: RunResult) -> None: ...


class Silent:
    """Says nothing; a base for observers that follow only some of it."""

    def on_start(self, config: Config, out_dir: Path, start_step: int) -> None: ...
    def on_phase(self, name: str) -> None: ...
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_message(self, text: str) -> None: ...
    def on_finish(self, result: RunResult) -> None: ...
