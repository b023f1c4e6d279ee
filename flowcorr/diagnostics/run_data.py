"""Runs read back from their folders: metrics, configuration, and which of them differ by seed only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from flowcorr.config import Config, to_mapping
from flowcorr.errors import ConfigError
from flowcorr.trackers import METRICS_FILE, read_metrics, redact
from flowcorr.trainer.run_folder import load_config

_OF_A_SEED = "trainer.seed"
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One run.

    Attributes:
        folder: where it lies.
        config: its configuration.
        settings: the configuration as dotted keys, secrets redacted.
        records: its `metrics.jsonl`.
    """

    folder: Path
    config: Config
    settings: Mapping[str, str]
    records: Sequence[Mapping[str, Any]]

    def series(self, metric: str) -> Points:
        """Steps and values of a metric, where it was logged and finite."""
        return [(record["step"], record[metric]) for record in self.records if record.get(metric) is not None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Runs whose configurations differ by seed only."""

    label: str
    runs: Sequence[Run]

    @property
    def config(self) -> Config:
        """The configuration of the first run."""
        return self.runs[0].config

    def band(self, metric: str) -> list[tuple[float, float, float, float]]:
        """Step, mean, smallest and largest value over the runs that logged the step."""
        values: dict[float, list[float]] = {}
        for run in self.runs:
            for step, value in run.series(metric):
                values.setdefault(step, []).append(value)
        return [(step, fmean(found), min(found), max(found)) for step, found in sorted(values.items())]

    def means(self, metric: str) -> Points:
        """Step and mean over the runs."""
        return [(step, mean) for step, mean, _, _ in self.band(metric)]


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: it holds no run, or one that logged nothing yet.
    """
    config = load_config(folder)
    path = folder / METRICS_FILE
    records = read_metrics(path) if path.is_file() else []
    if not records:
        raise ConfigError(f"{path} holds no metrics yet; let the run finish a step first")
    settings = {key: _text(value) for key, value in _flatten(redact(to_mapping(config))).items()}
    return Run(folder=folder, config=config, settings=settings, records=records)


def group_by_seed(runs: Sequence[Run]) -> list[Group]:
    """Groups of runs with equal configurations but for the seed, in the order of their first runs."""
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        key = tuple((name, value) for name, value in run.settings.items() if name != _OF_A_SEED)
        groups.setdefault(key, []).append(run)
    names = [_names(members, with_parent=False) for members in groups.values()]
    if len(set(names)) < len(names):
        names = [_names(members, with_parent=True) for members in groups.values()]
    return [Group(label=name, runs=members) for name, members in zip(names, groups.values(), strict=True)]


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Configuration keys on which the groups differ, with each group's value."""
    keys = dict.fromkeys(key for group in groups for key in group.runs[0].settings if key != _OF_A_SEED)
    values = {key: [group.runs[0].settings.get(key, "-") for group in groups] for key in keys}
    return {key: found for key, found in values.items() if len(set(found)) > 1}


def _names(runs: Sequence[Run], *, with_parent: bool) -> str:
    folders = [run.folder.resolve() for run in runs]
    names = [f"{folder.parent.name}/{folder.name}" if with_parent else folder.name for folder in folders]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)} runs)"


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
