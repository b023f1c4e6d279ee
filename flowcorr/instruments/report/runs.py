"""Runs read back from their folders: metrics, configuration, and which of them differ by seed only."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from flowcorr import dumps
from flowcorr.config import Config, dotted
from flowcorr.errors import ConfigError
from flowcorr.health.finding import Finding
from flowcorr.health.metric import Metric
from flowcorr.health.rule import Units
from flowcorr.health.rules import NUM_ELEMENTS, logged_num_elements, units_of, units_of_setting
from flowcorr.health.setting import Setting
from flowcorr.health.table import METRICS, rows_of
from flowcorr.instruments.dumped_loss import UNBOUNDED
from flowcorr.instruments.plots import BandPoint
from flowcorr.instruments.step_files import survey
from flowcorr.instruments.steps import DumpedRun, diagnosed, is_run, of_own_run, read_dumped
from flowcorr.instruments.steps import records as dumped_records
from flowcorr.instruments.thinning import spread_out
from flowcorr.private import redact, redact_text, secrets_of
from flowcorr.trackers import METRICS_FILE, checked_metrics
from flowcorr.trainer import run_config
from flowcorr.trainer.events import EVENTS_FILE, read_events
from flowcorr.trainer.run_config import is_file, read_config

MAX_STEPS = 200  # dumped steps read from a run: more would tell the same
_OF_A_SEED = "trainer.seed"
_MAX_ERROR = 2000  # characters of an error that a page shows
_ENDINGS = ("start", "resume", "failure", "end")
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One run.

    Attributes:
        folder: where it lies.
        setting: its loss, correction and schedule.
        config: its configuration; None of another trainer's run.
        settings: the configuration as dotted keys, secrets redacted.
        records: its `metrics.jsonl`.
        ending: how it ended if not at its last step, in words; else, or where nothing is known, empty.
        name: the end of `folder` that tells it from the other runs.
        started: the day on which it began, `YYYY-MM-DD`; empty where that is not known.
        dumped: dumped steps, at most `MAX_STEPS` from the first to the last of them; None without any.
        units: of another trainer's run, the units in which each training step is judged.
        faults: of the log-probs that it dumped.
        notes: what was left out; of another trainer's dump, what it lacks and what that would give.
    """

    folder: Path
    setting: Setting
    config: Config | None
    settings: Mapping[str, str]
    records: Sequence[Mapping[str, Any]]
    ending: str
    name: str
    started: str = ""
    dumped: DumpedRun | None = None
    units: Mapping[int, Units] = field(default_factory=dict)
    faults: Sequence[Finding] = ()
    notes: Sequence[str] = ()

    @property
    def correction(self) -> str:
        """Its correction, or the modes that its steps took in turn."""
        labels = [self.setting] if self.dumped is None or self.config else self.dumped.settings.values()
        return _in_turn(setting.correction.label for setting in labels)

    @property
    def failed(self) -> bool:
        """Whether an error ended it."""
        return self.ending.startswith("failed")

    @property
    def last_step(self) -> int:
        """The last step that was logged."""
        return int(max(record["step"] for record in self.records))

    def series(self, metric: str) -> Points:
        """Steps and values of a metric, at steps that logged a finite value."""
        known = [record for record in self.records if record.get(metric) is not None]
        # As floats: matplotlib refuses whole numbers above 2^63.
        return [(record["step"], float(record[metric])) for record in known]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Runs with configurations that differ by seed only."""

    label: str
    runs: Sequence[Run]

    @property
    def num_elements(self) -> int | None:
        """`D`, as the first run logged it."""
        return next(filter(None, map(logged_num_elements, self.runs[0].records)), None)

    @property
    def units(self) -> Units:
        """The units in which its runs are judged."""
        run = self.runs[0]
        if run.config is None:
            return run.units[max(run.units)]
        logged = (record for record in run.records if logged_num_elements(record) is not None)
        return units_of(run.config, next(logged, {}))

    @property
    def rows(self) -> Sequence[Metric]:
        """The metrics of its runs."""
        config = self.runs[0].config
        return METRICS if config is None else rows_of(config)

    def band(self, metric: str) -> list[BandPoint]:
        """Mean, smallest and largest value over the runs that logged a step."""
        values: dict[float, list[float]] = {}
        for run in self.runs:
            for step, value in run.series(metric):
                values.setdefault(step, []).append(value)
        return [
            (step, fmean(at_step), min(at_step), max(at_step)) for step, at_step in sorted(values.items())
        ]

    def means(self, metric: str) -> Points:
        """Step and mean over the runs."""
        return [(step, mean) for step, mean, _, _ in self.band(metric)]


def read_run(folder: Path, *, allow_imports: Collection[str] = ()) -> Run:
    """Read a run's folder, or one of steps that another trainer dumped.

    Args:
        folder: the folder.
        allow_imports: see `read_config`.

    Raises:
        ConfigError: it holds no run, or one that logged nothing yet, or a file cannot be read.

    Warns:
        UserWarning: a part of a file, or a dumped step, cannot be read and is left out.
    """
    if not is_run(folder):
        return _read_dump(folder, allow_imports)
    stored_config = read_config(folder, allow_imports=allow_imports)
    path = folder / METRICS_FILE
    records, odd = checked_metrics(path) if is_file(path) else ([], "")
    if not records:
        left = f"{odd}; no record is left" if odd else ""
        raise ConfigError(left or f"{path} holds no metrics yet; let the run finish a step first")
    _check_num_elements(path, records)
    every = dumps.files(folder)
    shown = {step: every[step] for step in spread_out(list(every), MAX_STEPS)}
    steps, notes = survey(shown, stored_config.config)
    notes = [*filter(None, [odd]), *notes]
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    settings = {key: _text(value) for key, value in dotted(redact(stored_config.values)).items()}
    dumped = of_own_run(folder, stored_config, steps, notes) if steps else None
    events = _events(folder)
    return Run(
        folder=folder,
        setting=Setting.of(stored_config.config),
        config=stored_config.config,
        settings=settings,
        records=records,
        ending=redact_text(_ending(events), secrets_of(stored_config.values)),
        started=next((str(event.get("time", ""))[:10] for event in events), ""),
        name=_readable(os.path.basename(os.path.realpath(folder))),
        dumped=dumped,
        faults=[
            fault
            for fault in (diagnosed(dumped) if dumped else [])
            if fault.cause != "stale" or not stored_config.config.rollout.max_weight_age
        ],
        notes=[*notes, *run_config.notes(stored_config.left_out)],
    )


def _read_dump(folder: Path, allow_imports: Collection[str]) -> Run:
    dumped = read_dumped(folder, allow_imports=allow_imports)
    actors = [setting.actor for setting in dumped.settings.values()]
    known = {
        "actor.loss_mode": dumped.loss_mode,
        "actor.clip_ratio": _in_turn(
            _text(actor.clip_ratio) for actor in actors if actor.clip_ratio != UNBOUNDED
        ),
    }
    shown = spread_out(list(dumped.steps), MAX_STEPS)
    return Run(
        folder=folder,
        setting=dumped.setting,
        config=dumped.config,
        settings={key: value for key, value in known.items() if value},
        records=dumped_records(dumped),
        ending="",
        name=_readable(os.path.basename(os.path.realpath(folder))),
        dumped=replace(dumped, steps={step: dumped.steps[step] for step in shown}),
        units={
            number: units_of_setting(
                dumped.settings[number], dumped.num_elements, num_terms=step.terms.rollout_log_probs.numel()
            )
            for number, step in dumped.steps.items()
        },
        faults=diagnosed(dumped),
        notes=dumped.notes,
    )


def _check_num_elements(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    for record in records:
        size = record.get(NUM_ELEMENTS)
        if size is not None and not (size >= 1 and size == int(size)):
            raise ConfigError(
                f"{path}: {NUM_ELEMENTS}={size:g} at step {record['step']} must be a whole number from 1"
            )


def group_by_seed(runs: Sequence[Run]) -> list[Group]:
    """Groups of runs with equal configurations but for the seed, in the order of their first runs.

    A dump of another trainer is a group of its own: its configuration is not known.
    """
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run, name in zip(runs, _names([Path(os.path.realpath(run.folder)) for run in runs]), strict=True):
        key = tuple(setting for setting in run.settings.items() if setting[0] != _OF_A_SEED)
        groups.setdefault(key if run.config is not None else (run.folder,), []).append(
            replace(run, name=name)
        )
    return [Group(label=_label(members), runs=members) for members in groups.values()]


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Configuration keys on which the groups differ, with each group's value."""
    keys = dict.fromkeys(key for group in groups for key in group.runs[0].settings if key != _OF_A_SEED)
    values = {key: [group.runs[0].settings.get(key, "-") for group in groups] for key in keys}
    return {key: settings for key, settings in values.items() if len(set(settings)) > 1}


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest distinct suffix of each path."""
    longest = max(len(folder.parts) for folder in folders)
    for length in range(1, longest + 1):
        names = ["/".join(map(_readable, folder.parts[-length:])) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


def _readable(name: str) -> str:
    """A file's name with replacements for bytes that cannot be decoded."""
    return os.fsencode(name).decode(errors="replace")


def _label(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)} runs)"


def _events(folder: Path) -> list[dict[str, Any]]:
    path = folder / EVENTS_FILE
    return read_events(path) if is_file(path) else []


def _ending(events: Sequence[Mapping[str, Any]]) -> str:
    last = next((event for event in reversed(events) if event["kind"] in _ENDINGS), None)
    if last is None or last.get("status") == "finished":
        return ""
    step = last.get("step")
    match last["kind"]:
        case "failure":
            return f"failed after step {step}: {_shortened(last.get('error'))}"
        case "end":
            return f"was {last.get('status')} after step {step}"
    return "has not ended: it still runs, or it was killed"


def _shortened(error: object) -> str:
    text = str(error)
    return text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


def _in_turn(texts: Iterable[str]) -> str:
    """Different texts in the order in which they come; one that comes again is not repeated."""
    return ", then ".join(dict.fromkeys(texts))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
