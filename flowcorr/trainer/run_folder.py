"""The folder of a run: its files, the process that owns it, and how its run is resumed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shlex
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowcorr import config as configs
from flowcorr import distributed
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError, CheckpointError, ConfigError, as_utf8
from flowcorr.private import redact
from flowcorr.trackers.jsonl import METRICS_FILE, checked_metrics
from flowcorr.trainer import checkpoint
from flowcorr.trainer.events import EVENTS_FILE, EventLog
from flowcorr.trainer.run_config import CONFIG_FILE, read_config

logger = logging.getLogger(__name__)

CHECKPOINTS, FAILURE_FILE = "checkpoints", "failure.txt"
_FAILURES = "failure_rank{}.txt"
_LOCK = ".lock"
_LOGS = (".log", ".out", ".err")  # what a launcher may write there first
_MAY_CHANGE = frozenset(  # errors advise some of them
    f"{section}.{key}"
    for section, keys in {
        "actor": ("fsdp", "micro_batch_size", "fold_steps", "gradient_checkpointing", "compile"),
        "model": ("offload_text_encoders",),
        "reward": ("num_workers", "worker_resources", "timeout", "on_error"),
        "rollout": (
            *("num_workers", "worker_resources", "timeout", "ray_address", "scheduling"),
            *("drift_every", "replay_every", "batch_size", "engine.weight_sync"),
        ),
        "trainer": (
            *("total_steps", "eval_every", "eval_on", "save_every", "keep_checkpoints", "requeue"),
            *("image_every", "trackers", "metrics", "checks", "on_fault", "best_metric", "num_threads"),
            *("collective_timeout", "doctor", "dump_log_probs", "device"),
        ),
    }.items()
    for key in keys
)
_REWARD_MAY_CHANGE = ("device", "batch_size")  # where a reward's model computes, and how much at once
_SERVICES = ("http", "vlm_judge")
_SERVICE_MAY_CHANGE = (  # where a service is, and how it is asked
    *("url", "base_url", "token_env", "api_key_env", "verify"),
    *("timeout", "retries", "backoff", "concurrency", "max_response_bytes"),
)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from training in `folder` until this block or the process ends.

    Raises:
        ConfigError: another process trains there, or the folder holds files of something else, or cannot be written to.
    """
    with _writable(folder):
        _check_own(folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("w")
    with file:
        # A forked worker of a user's reward may outlive a run that is killed, and would keep the folder locked.
        os.register_at_fork(after_in_child=file.close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process trains in {folder}; wait for it or end it, or choose another folder with --out"
            ) from error
        except OSError as error:
            logger.debug("%s cannot be locked (%s): the user has to keep other runs out of it", folder, error)
        yield


def claim(folder: Path, config: Config, *, resume: bool) -> None:
    """Make `folder` this run's folder; a run that never finished its first evaluation gives it up.

    A run that is resumed is left as it is, until it is known that it can go on: see `write_config`.

    Raises:
        ConfigError: the folder holds a run that is not resumed or has another configuration, or it cannot be written.
        CheckpointError: the folder holds a run without its checkpoints.
    """
    if _holds_run(folder):
        if not resume:
            raise ConfigError(
                f"{folder} already holds a run; continue it with --resume, or choose another folder with --out"
            )
        _check_unchanged(folder, config)
        _check_checkpoints(folder)
        return
    write_config(folder, config)
    if not resume:
        with _writable(folder):
            (folder / EVENTS_FILE).unlink(missing_ok=True)


def write_config(folder: Path, config: Config) -> None:
    """Write the configuration of the run that begins or goes on in `folder`, and delete the reason of its last failure.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # With its secrets, since it has to load again.
        checkpoint.write_text(folder / CONFIG_FILE, configs.to_yaml(config))
        for failure in (folder / FAILURE_FILE, *folder.glob(_FAILURES.format("*"))):
            failure.unlink(missing_ok=True)


def _check_own(folder: Path) -> None:
    """Refuse a folder in which no run was ever started, and which holds files besides logs."""
    if not folder.is_dir() or (folder / _LOCK).is_file() or was_trained_in(folder):
        return
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.suffix not in _LOGS)
    if foreign:
        named = f"{', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}"
        raise ConfigError(
            f"{folder} holds files that are not of a run ({named}); choose a new or empty folder with --out"
        )


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the run's folder {folder} cannot be written: {error}") from error


@contextlib.contextmanager
def failure_noted(folder: Path, events: EventLog, *, keep_earlier: bool = False) -> Iterator[None]:
    """If a run fails, write the reason to its folder and tell the other ranks.

    Args:
        folder: the run's.
        events: its log.
        keep_earlier: whether the reason for which the run failed before stays in the file where a configuration or a
            checkpoint is refused, which then is an event alone.

    Raises:
        BackendError: code that the run called raised `SystemExit` or another exception that would end it silently.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        refused = isinstance(error, ConfigError | CheckpointError)
        if not (keep_earlier and refused and (folder / FAILURE_FILE).is_file()):
            write_failure(folder, traceback.format_exc())
        failure = (
            error if isinstance(error, Exception) else BackendError(f"{error!r} was raised during the run")
        )
        events("failure", error=f"{type(failure).__name__}: {failure}")
        distributed.report_failure(failure)
        if failure is error:
            raise
        raise failure from error


def write_failure(folder: Path, reason: str) -> None:
    """Write the reason of a failure to the run's folder, if that is still possible; each rank has its own file."""
    path = folder / (FAILURE_FILE if distributed.is_main() else _FAILURES.format(distributed.rank()))
    try:
        checkpoint.write_text(path, as_utf8(reason))
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)


def resume_command(folder: Path) -> str:
    """The shell command that resumes the run in `folder`."""
    recipe, out = shlex.quote(str(folder / CONFIG_FILE)), shlex.quote(str(folder))
    return f"flowcorr train {recipe} --resume --out {out}"


def was_trained_in(folder: Path) -> bool:
    """Whether `flowcorr train` has ever started a run in `folder`."""
    return (folder / EVENTS_FILE).is_file() or _holds_run(folder)


def _holds_run(folder: Path) -> bool:
    metrics = folder / METRICS_FILE
    return bool(checkpoint.folders(folder / CHECKPOINTS)) or (
        metrics.is_file() and metrics.stat().st_size > 0
    )


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The records in the `metrics.jsonl` of the run in `folder`; none if there is no such file."""
    path = folder / METRICS_FILE
    return checked_metrics(path)[0] if path.is_file() else []


def record_of(folder: Path, step: int) -> dict[str, float]:
    """The metrics of a training step, from `metrics.jsonl` of the run in `folder`; null becomes NaN."""
    return {
        name: math.nan if value is None else value
        for record in metrics_of(folder)
        if record["step"] == step
        for name, value in record.items()
        if name != "step"
    }


def _check_checkpoints(folder: Path) -> None:
    """Refuse to begin again at step 0 in the folder of a run that has lost its checkpoints."""
    last = max((record["step"] for record in metrics_of(folder)), default=0)
    if last > 0 and not checkpoint.steps(folder / CHECKPOINTS):
        raise CheckpointError(
            f"{folder / CHECKPOINTS} holds no checkpoint, but {METRICS_FILE} has records up to step {last}, which a "
            "run from step 0 would replace; restore the checkpoints, or choose another folder with --out"
        )


def _check_unchanged(folder: Path, config: Config) -> None:
    changes = _changes(read_config(folder).values, configs.to_mapping(config))
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
        if name in _MAY_CHANGE:
            continue
        if name in ("reward.terms", "reward.gold"):
            before, after = _scoring(old[key]), _scoring(new[key])
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += _changes(before, after, f"{name}.")
        elif before != after:
            was, now = (json.dumps(redact({key: value})[key]) for value in (before, after))
            changes.append(f"{name} was {was}, now {now}")
    return changes


def _scoring(terms: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Terms of a reward without the options that may change."""
    scoring = []
    for term in terms:
        may_change = _SERVICE_MAY_CHANGE if term["name"] in _SERVICES else _REWARD_MAY_CHANGE
        options = {name: value for name, value in term["options"].items() if name not in may_change}
        scoring.append({**term, "options": options})
    return scoring
