"""Files with the log-probs of training steps, which any trainer can write: one `step_000123.safetensors` for each step.

`dump` writes such a file from tensors or arrays; `trainer.dump_log_probs` writes the same format. `flowcorr
report` and `audit` read a folder of them. `GIVES` says what they use each optional field for.

`ReplaySamples` are a few samples of a step, for a replay by `flowcorr doctor`: see `flowcorr.dumps.replay`.

A file holds the tensors of `DumpedTerms` under their names. Its metadata is text: `format_version`, `step`, `mode`
(`decoupled`: old log-probs were recomputed; `bypass`: they are the rollout's) and `loss_mode`; where known also
`num_elements`, `version`, `adv_clip_max` and, as JSON, `clip_ratio`. Later versions may add fields, and keep these.

A file may be a stranger's: `load` and `load_loss` check all of it, and run nothing that it names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

from flowcorr.dumps import arrays, checks
from flowcorr.dumps.checks import Array
from flowcorr.dumps.checks import DumpedTerms as DumpedTerms
from flowcorr.dumps.files import damaged, opened, write
from flowcorr.dumps.replay import ReplaySamples, discard_replay, save_replay
from flowcorr.errors import BatchError, ConfigError, unknown_choice
from flowcorr.imports import is_own_name
from flowcorr.losses.table import CLIP, LOSSES

FOLDER = "log_probs"
GIVES = {
    "current_log_probs": "ratios after the first update (audit), and curves of the update (report)",
    "before_update": "the gap without what was learned from the batch, in bypass mode (audit, report)",
    "clip_ratio": "clipped terms, and noise beside the clip range (audit, report)",
    "num_elements": "scales sqrt and sum, step_z, and joint nats with advice on weights (audit)",
    "step_indices": "the gap by step of the schedule; else steps are counted by noise level, or within the window",
    "sigmas": "the noise level of each step (audit)",
    "rewards": "the curve of the reward (report), and the order of advantages (doctor)",
    "group_ids": "groups with equal rewards (report), and rejection_groups (audit)",
    "policy_versions": "together with version, the age of the weights that sampled (audit, report)",
}
"""Optional fields of `dump`, and what each gives."""
_OF_STEP = ("version", "num_elements")
_OF_LOSS = ("clip_ratio", "adv_clip_max")
_TOLD = (*_OF_STEP, "loss_mode", *_OF_LOSS)  # in the metadata of a file
_STEP = "step_{:06d}.safetensors"
_STEP_NAME = re.compile(r"step_([0-9]{1,12})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLoss:
    """The loss of a dumped step, see `ActorConfig`; unknown values are None."""

    loss_mode: str = "flow_grpo"
    clip_ratio: float | Sequence[float] | None = None
    adv_clip_max: float | None = None


class StepFields(TypedDict, total=False):
    """Arguments of `flowcorr.dump` and `flowcorr.watch` about a training step; a value that is None is not known.

    Attributes:
        rollout_log_probs: `[B, T]` of the policy that sampled, mean-pooled: nats per latent element.
        advantages: `[B]`, or `[B, T]` with one value a sample.
        old_log_probs: `[B, T]` of the old policy, recomputed by the trainer; None if the trainer took the rollout's
            for them (bypass mode), as flow_grpo does.
        current_log_probs: `[B, T]`, as the loss used them; NaN in terms that were not trained, as many in each sample,
            or in whole steps of the window.
        before_update: `[B, T]` true or false, or 1 or 0: which of `current_log_probs` were scored before the step's
            first update. In bypass mode, the gap is judged by these terms alone.
        rewards: `[B]`, or `[B, T]` with one value a sample.
        group_ids: `[B]` numbers or names; samples of one prompt share one.
        step_indices: `[B, T]` or `[T]`, places of the steps in the schedule.
        sigmas: `[B, T]` or `[T]`, noise levels before the steps.
        stds: `[B, T]` or `[T]`, full standard deviations of the steps.
        old_rollout_kl: `[B, T]`, exact KL of the old policy from the rollout policy, nats per latent element; in bypass
            mode, where both are one, that of the policy of `current_log_probs`.
        drift_squares, gradient_squares: `[B, T]`, see `flowcorr.algorithm.drift_squares`.
        policy_versions: `[B]` whole numbers, the version of the weights that sampled, such as their update's number.
        version: the version of the trainer's weights before the step's first update.
        num_elements: `D`, elements of a latent: channels times height times width, of a video also times latent
            frames.
        clip_ratio: PPO clip range of the loss, or a list of one for each step of the schedule, from its first step on,
            whichever of them the window has.
        loss_mode: flowcorr's name of the loss, `flow_grpo` if it is left out; or `package.module:name` of another.
        adv_clip_max: what the loss clamps advantages to.
    """

    rollout_log_probs: Required[Array]
    advantages: Required[Array]
    old_log_probs: Array | None
    current_log_probs: Array | None
    before_update: Array | None
    rewards: Array | None
    group_ids: Array | None
    step_indices: Array | None
    sigmas: Array | None
    stds: Array | None
    old_rollout_kl: Array | None
    drift_squares: Array | None
    gradient_squares: Array | None
    policy_versions: Array | None
    version: int | None
    num_elements: int | None
    clip_ratio: float | Sequence[float] | None
    loss_mode: str
    adv_clip_max: float | None


def dump(
    folder: str | PathLike[str],
    step: int,
    *,
    replay: ReplaySamples | None = None,
    **fields: Unpack[StepFields],
) -> Path:
    """Write the log-probs of a training step of any trainer, for `flowcorr report` and `audit`.

    Call it on one rank, with the samples of all ranks, for instance after `accelerator.gather`.

    Args:
        folder: the folder; created if missing.
        step: the training step, from 0 on.
        replay: a few samples for `flowcorr doctor`, taken in the sampling loop.
        fields: of the step, see `StepFields`; `rollout_log_probs` and `advantages` are required.

    Returns:
        The file of the log-probs.

    Raises:
        BatchError: a shape does not fit, or a value is not allowed.
        BackendError: the folder cannot be written to.
        TypeError: a field is unknown, or a required one is missing.

    Warns:
        UserWarning: the folder holds the step already; its file and its captured samples are replaced.
    """
    terms, loss = described(step, **fields)
    earlier = Path(folder) / _STEP.format(step)
    if earlier.exists():
        warnings.warn(
            f"{earlier} was there and is replaced: call flowcorr.dump once a step, on one rank, and give each run a "
            "folder of its own; a resumed run may write a step again",
            UserWarning,
            stacklevel=2,
        )
    path = save(Path(folder), step, terms, loss)
    if replay is not None:
        save_replay(path.parent, step, replay)
    else:
        discard_replay(path.parent, step)
    return path


def described(step: int, **given: Unpack[StepFields]) -> tuple[DumpedTerms, LoggedLoss]:
    """The terms and the loss of a step, checked.

    Raises:
        BatchError: a shape does not fit, or a value is not allowed.
        TypeError: a field is unknown, or a required one is missing.
    """
    if isinstance(step, str):
        raise BatchError(f"step={step!r} is a text; it must be a whole number below 1e12")
    unknown = given.keys() - StepFields.__annotations__.keys()
    if unknown:
        raise TypeError(unknown_choice("field", min(unknown), StepFields.__annotations__))
    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    name = known.get("loss_mode", "flow_grpo")
    if name not in LOSSES and not (isinstance(name, str) and is_own_name(name)):
        raise BatchError(
            f"{unknown_choice('loss_mode', name, LOSSES)}, or name the trainer's own as 'package.module:name'"
        )
    if missing := [name for name in ("rollout_log_probs", "advantages") if name not in known]:
        raise TypeError(f"missing: {', '.join(missing)}")
    plain: dict[str, Any] = {name: arrays.plain(name, known.pop(name)) for name in _TOLD if name in known}
    numbers = {name: plain.pop(name) for name in _OF_STEP if name in plain}
    loss = LoggedLoss(**plain)
    rollout = arrays.numbers("rollout_log_probs", known["rollout_log_probs"])
    if problem := checks.problem_of_shape(rollout.shape):
        raise BatchError(problem)
    if "group_ids" in known:
        known["group_ids"] = arrays.numbered(known["group_ids"])
    columns = {name: arrays.numbers(name, value) for name, value in known.items()}
    tensors: dict[str, Any] = arrays.trained(
        {name: arrays.fitted(name, values, rollout.shape) for name, values in columns.items()}
    )
    rollout, bypass = tensors["rollout_log_probs"], "old_log_probs" not in tensors
    if bypass and "old_rollout_kl" in tensors:
        tensors |= {"current_rollout_kl": tensors.pop("old_rollout_kl")}
    terms = DumpedTerms(bypass=bypass, **{"old_log_probs": rollout, **tensors}, **numbers)
    problem = checks.problem_of_metadata(_metadata(step, terms, loss))
    problem = problem or checks.problem_of_values(terms.tensors(), terms.version)
    if problem := problem or checks.problem_of_step(terms.tensors(), loss.clip_ratio):
        raise BatchError(problem)
    return terms, loss


def save(folder: Path, step: int, terms: DumpedTerms, loss: LoggedLoss) -> Path:
    """Write the terms of a step to a file in `folder`, completely or not at all.

    Raises:
        BackendError: the folder cannot be written to.
    """
    otherwise = "train without the dump (trainer.dump_log_probs=false)"
    return write(folder / _STEP.format(step), terms.tensors(), _metadata(step, terms, loss), otherwise)


def load(path: Path) -> DumpedTerms:
    """Read the file of a step: whole numbers as int64, others as float32, or float64 if stored so.

    Raises:
        ConfigError: the file is damaged, or has another format. The message names the field, its value and what is
            allowed.
    """
    with _opened(path) as (file, metadata):
        slices = {name: file.get_slice(name) for name in sorted(checks.COLUMNS.keys() & set(file.keys()))}
        header = {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
        if problem := checks.problem_of_header(header):
            raise damaged(path, problem)
        tensors = {name: arrays.numbers(name, file.get_tensor(name)) for name in header}
    bypass = metadata["mode"] == "bypass"
    values: dict[str, Any] = {**tensors}
    values |= {name: int(metadata[name]) for name in _OF_STEP if name in metadata}
    terms = DumpedTerms(bypass=bypass, **values)
    problem = checks.problem_of_values(tensors, terms.version)
    problem = problem or checks.problem_of_log_probs(
        terms.rollout_log_probs, terms.old_log_probs, bypass=bypass
    )
    if problem:
        raise damaged(path, problem)
    return terms


def load_loss(path: Path) -> LoggedLoss:
    """Read the loss from a step's file; its `loss_mode` may be any name.

    Raises:
        ConfigError: as `load`.
    """
    with _opened(path) as (_, metadata):
        numbers = {name: json.loads(metadata[name]) for name in _OF_LOSS if name in metadata}
        return LoggedLoss(loss_mode=metadata["loss_mode"], **numbers)


def files(run_dir: Path) -> dict[int, Path]:
    """The files of a run by training step, in ascending order; `run_dir` is a run's folder, or holds them itself.

    Raises:
        ConfigError: two files are of one step, or the folder cannot be read.
    """
    by_step: dict[int, Path] = {}
    for step, path in _found(run_dir):
        if step in by_step:
            raise ConfigError(f"{by_step[step]} and {path} are both of step {step}; delete the wrong one")
        by_step[step] = path
    return by_step


def discard_after(run_dir: Path, step: int) -> None:
    """Delete the files of later steps; training from `step` will write them again."""
    for later, path in _found(run_dir):
        if later > step:
            path.unlink()


def missing(terms: DumpedTerms, loss: LoggedLoss) -> list[str]:
    """The names of the fields of `GIVES` that are not there, and that would tell something."""
    known = {*terms.tensors(), *_numbers(terms, loss)}
    if not terms.bypass or terms.current_log_probs is None:
        known.add("before_update")  # it would say nothing
    row = LOSSES.get(loss.loss_mode)
    if row is not None and row.limit != CLIP:
        known.add("clip_ratio")  # the loss reads none
    return [name for name in GIVES if name not in known]


def _found(run_dir: Path) -> list[tuple[int, Path]]:
    inner = run_dir / FOLDER
    try:
        folder = inner if inner.is_dir() else run_dir
        names = [_STEP_NAME.fullmatch(name) for name in (os.listdir(folder) if folder.is_dir() else [])]
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be read: {error.strerror or error}") from error
    return sorted((int(match[1]), folder / match[0]) for match in names if match)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """The file of a step and its metadata, checked."""
    with opened(path) as (file, metadata):
        problem = checks.problem_of_metadata(metadata)
        named = _STEP_NAME.fullmatch(path.name)
        if not problem and named and int(named[1]) != int(metadata["step"]):
            problem = f"step={metadata['step']!r} is not the step of its name"
        if problem:
            raise damaged(path, problem)
        yield file, metadata


# What is written -----------------------------------------------------------------------------------------------


def _metadata(step: int, terms: DumpedTerms, loss: LoggedLoss) -> dict[str, str]:
    mode = "bypass" if terms.bypass else "decoupled"
    numbers = {name: json.dumps(value) for name, value in _numbers(terms, loss).items()}
    return {"step": str(step), "mode": mode, "loss_mode": loss.loss_mode, **numbers}


def _numbers(terms: DumpedTerms, loss: LoggedLoss) -> dict[str, Any]:
    """The numbers of the metadata that are known."""
    stated = {name: getattr(terms, name) for name in _OF_STEP}
    stated |= {name: getattr(loss, name) for name in _OF_LOSS}
    return {name: value for name, value in stated.items() if value is not None}
