"""The folder of a run: what lies where, whose it is, and how the run in it is continued."""

from __future__ import annotations

import json
import logging
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowcorr import config as configs
from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError
from flowcorr.trackers import redact
from flowcorr.trackers.jsonl import METRICS_FILE
from flowcorr.trainer import checkpoint

logger = logging.getLogger(__name__)

CHECKPOINTS, CONFIG_FILE, FAILURE_FILE, IMAGES = "checkpoints", "config.yaml", "failure.txt", "images"
_MAY_CHANGE = frozenset(
    f"trainer.{key}"
    for key in (
        "total_steps",
        "eval_every",
        "save_every",
        "keep_checkpoints",
        "image_every",
        "trackers",
        "best_metric",
        "num_threads",
        "doctor",
        "device",
    )
)


def claim(folder: Path, config: Config, *, resume: bool) -> None:
    """Make `folder` this run's; a folder whose run never got to its first evaluation is free again.

    Raises:
        ConfigError: it holds a run that is not to be resumed or has another configuration, or it cannot be
            written to.
    """
    path = folder / CONFIG_FILE
    if _holds_run(folder):
        if not resume:
            raise ConfigError(
                f"{folder} already holds a run; continue it with --resume, or choose another folder with --out"
            )
        _check_unchanged(folder, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mapping = configs.to_mapping(config)
        # The file must load again, so it keeps secrets such as a reward's API key: for its owner alone.
        checkpoint.write_text(path, configs.to_yaml(config), private=redact(mapping) != mapping)
        (folder / FAILURE_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"the run's folder {folder} cannot be written: {error}") from error


def load_config(folder: Path, overrides: tuple[str, ...] = ()) -> Config:
    """The configuration of the run in `folder`.

    Raises:
        ConfigError: there is none, or the overrides cannot be used.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} holds no run: {CONFIG_FILE} is missing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the user read them when the run began
        return configs.load(path, overrides)


def write_failure(folder: Path, reason: str) -> None:
    """Leave the reason why a run died in its folder, if anything can still be written there."""
    try:
        checkpoint.write_text(folder / FAILURE_FILE, reason)
    except OSError as error:
        logger.warning("%s could not be written: %s", folder / FAILURE_FILE, error)


def resume_command(folder: Path) -> str:
    """The shell command that continues the run in `folder`."""
    recipe, out = shlex.quote(str(folder / CONFIG_FILE)), shlex.quote(str(folder))
    return f"flowcorr train {recipe} --resume --out {out}"


def _holds_run(folder: Path) -> bool:
    metrics = folder / METRICS_FILE
    return bool(checkpoint.folders(folder / CHECKPOINTS)) or (
        metrics.is_file() and metrics.stat().st_size > 0
    )


def _check_unchanged(folder: Path, config: Config) -> None:
    changes = _changes(configs.to_mapping(load_config(folder)), configs.to_mapping(config))
    if changes:
        raise ConfigError(
            f"{folder} holds a run of another configuration, which --resume cannot continue: "
            + "; ".join(changes)
            + ". Use the old values, or another folder with --out"
        )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    changes = []
    for key in sorted(old.keys() | new.keys()):
        before, after, name = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += _changes(before, after, f"{name}.")
        elif before != after and name not in _MAY_CHANGE:
            changes.append(f"{name} was {json.dumps(redact(before))}, now {json.dumps(redact(after))}")
    return changes
