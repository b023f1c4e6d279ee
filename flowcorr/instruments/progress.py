"""Progress of a run: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flowcorr.errors import BackendError
from flowcorr.instruments import gap_words

if TYPE_CHECKING:
    from flowcorr.config import Config
    from flowcorr.health.rules import HealthMonitor
    from flowcorr.trainer import RunResult

_STATISTICS = "/image/"
_GAP = "  "  # between the fields of a line
_NUMBER = re.compile(r"\d[\d.e+-]*")
_CLOSED = (OSError, ValueError, SystemExit)  # rich raises the last where the reader of a pipe has gone


class TerminalObserver:
    """Follows a run on the terminal; use it as a context manager, so that the terminal is left in order.

    A run starts (`on_start`) before its first step.

    Args:
        console: where to print; None for standard output.
        recipe: the recipe that the run follows without an override, if it does; the audit that is advised at the end
            names it, or else the run's own configuration.
    """

    _config: Config
    _labels: Mapping[str, str]
    _out_dir: Path

    def __init__(self, console: Console | None = None, *, recipe: str | None = None) -> None:
        self._recipe = recipe
        self._console = console or Console(highlight=False)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            speed_estimate_period=600,
            console=self._console,
            disable=not self._live,
        )
        self._task = self._progress.add_task("step", total=None)
        self._clock = time.monotonic
        self._start = self._first_step_start = self._clock()
        self._start_step = self._total = 0
        self._evals: list[Mapping[str, float]] = []
        self._steps: list[Mapping[str, float]] = []
        self._health: HealthMonitor | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*_CLOSED):
            self._progress.stop()

    def on_start(self, config: Config, out_dir: Path, start_step: int) -> None:
        """The run is set up and begins after `start_step`."""
        from flowcorr.health.table import progress_labels, rows_of

        self._labels = progress_labels(rows_of(config))
        self._config, self._out_dir = config, out_dir
        self._start = self._first_step_start = self._clock()
        self._start_step, self._total = start_step, config.trainer.total_steps
        begin = f"resumes after step {start_step}" if start_step else f"{self._total} steps"
        self._say(
            f"{config.model.path} -> {out_dir}: {begin}, {gap_words.treatment(config.algorithm.rollout_correction)}"
        )
        self._progress.update(self._task, total=self._total, completed=start_step)
        self._recall(start_step)

    def on_phase(self, name: str) -> None:
        """The run enters a part of a step."""
        self._progress.update(self._task, description=name)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A training step is done."""
        shown = {
            name: f"{label} {metrics[name]:.3g}" for name, label in self._labels.items() if name in metrics
        }
        learned = [shown.pop(name) for name in list(shown) if name.startswith("reward/")]
        nats = gap_words.joint_nats(self._config, metrics)
        correction = self._config.algorithm.rollout_correction
        measured = ["" if nats is None else gap_words.gap(nats), gap_words.action(correction, metrics)]
        fields = list(filter(None, (*learned, *measured, *shown.values())))
        self._progress.update(self._task, completed=step)
        self._say(self._line(f"step {step}/{self._total}", fields, self._remaining(step)))
        self._steps.append(metrics)
        self._say_what_is_unhealthy(metrics)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""
        self._evals.append(metrics)
        if step == self._start_step:
            self._first_step_start = self._clock()
        self._say(f"eval at step {step}: {_scores(metrics)}", prose=True)

    def on_message(self, text: str) -> None:
        """Something that the user should read."""
        self._say(text)

    def on_finish(self, result: RunResult) -> None:
        """The run has ended, at its last step or by a signal."""
        from flowcorr.instruments.report.learning import CONSTANT, is_constant

        seconds = self._clock() - self._start
        self._say(f"{result.status} after step {result.step} in {_duration(seconds)}: {result.out_dir}")
        if len(self._evals) > 1:
            self._say(f"held out: {_changes(self._evals[0], self._evals[-1])}", prose=True)
        if is_constant(self._steps):
            self._say(
                f"warning: {CONSTANT}; flowcorr report {shlex.quote(str(result.out_dir))} shows the images"
            )
        if self._steps and result.status == "finished":
            self._say(gap_words.measurement(self._config, self._steps), prose=True)
            recipe = self._recipe or str(result.out_dir / "config.yaml")
            is_equal = gap_words.mean_gap(self._config, self._steps) == 0
            self._say(_next_commands(result.out_dir, "" if is_equal else recipe))
        if result.resume_command is not None:
            self._say(f"resume with: {result.resume_command}")

    def _recall(self, start_step: int) -> None:
        """Take the steps and evaluations up to `start_step` from the records of a run that was resumed."""
        for record in self._earlier():
            values = {name: value for name, value in record.items() if value is not None}
            if values["step"] <= start_step:
                scores = {name: value for name, value in values.items() if name.startswith("eval/")}
                self._evals += [scores] if scores else []
                self._steps += [values] if values["step"] > 0 else []

    def _say_what_is_unhealthy(self, metrics: Mapping[str, float]) -> None:
        from flowcorr.health.rules import HealthMonitor, units_of
        from flowcorr.health.table import rows_of, rules_of
        from flowcorr.instruments.rollout_workers import places_of

        if self._health is None:
            units = units_of(self._config, metrics)
            places, rules = places_of(self._out_dir), rules_of(rows_of(self._config))
            self._health = HealthMonitor(units, rules, earlier=self._earlier(), places=places)
        for finding in self._health.update(metrics):
            if finding.level != "note":
                self._say(str(finding), prose=True)

    def _earlier(self) -> Sequence[Mapping[str, float]]:
        """The records of a run that was resumed."""
        from flowcorr.trackers import METRICS_FILE, read_metrics

        path = self._out_dir / METRICS_FILE
        return read_metrics(path) if path.is_file() else []

    def _remaining(self, step: int) -> str:
        per_step = (self._clock() - self._first_step_start) / max(1, step - self._start_step)
        return f"{per_step:.1f} s a step, {_duration(per_step * (self._total - step))} left"

    def _line(self, head: str, fields: Sequence[str], remaining: str) -> str:
        """A step's line: all fields for a file; on a terminal, with its bar for the time, the first fields that fit."""
        if not self._live:
            return _GAP.join((head, *fields, remaining))
        room = self._console.width - len(head)
        for count, field in enumerate(fields):
            room -= len(_GAP) + len(_NUMBER.sub("0.000", field))  # so that digits do not decide
            if room < 0:
                return _GAP.join((head, *fields[:count]))
        return _GAP.join((head, *fields))

    def _say(self, text: str, *, prose: bool = False) -> None:
        """Print lines; prose is broken between words, and a command never."""
        try:
            self._console.print(text, markup=False, soft_wrap=not (prose and self._live))
        except UnicodeEncodeError:  # it is a ValueError too, but the output is open
            raise
        except _CLOSED as error:
            if self._live and getattr(error, "errno", None) == errno.EIO:
                _leave_terminal()
                return
            raise BackendError(
                "standard output is closed, so the run cannot be followed; write it to a file with > run.log"
            ) from error


def _leave_terminal() -> None:
    """Discard output to a terminal that was closed, which SIGHUP tells."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    terminal = os.fstat(sys.stdout.fileno()).st_rdev
    for stream in (sys.stdout, sys.stderr):
        if os.fstat(stream.fileno()).st_rdev == terminal:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _next_commands(out_dir: Path, recipe: str) -> str:
    """The next commands after a first run; without a recipe no audit of it."""
    run = shlex.quote(str(out_dir))
    rows = (
        (f"flowcorr report {run}", "what it learned"),
        *([(f"flowcorr audit {shlex.quote(recipe)}", "does the gap matter?")] if recipe else []),
        ("flowcorr plan sd35_medium_ocr_lora --gpu rtx4090-24gb", "does a real model fit?"),
    )
    width = max(len(command) for command, _ in rows)
    return "\n".join(["next:", *(f"  {command:<{width}}  {what}" for command, what in rows)])


def _scores(metrics: Mapping[str, float]) -> str:
    return _GAP.join(f"{name.removeprefix('eval/')} {metrics[name]:.3f}" for name in _means(metrics))


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name.removeprefix('eval/')} {before[name]:.3f} -> {after[name]:.3f}"
        for name in _means(before)
        if name in after
    )


def _means(scores: Mapping[str, float]) -> list[str]:
    """The names of mean scores, without spreads, counts and statistics of images."""
    others = ("_std", "/scored_images")
    return [name for name in scores if _STATISTICS not in name and not name.endswith(others)]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"
