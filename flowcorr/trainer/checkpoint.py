"""Checkpoints that are complete or absent: written aside, synced, renamed, and verified by digest.

A checkpoint is a folder `checkpoints/step_000010` with safetensors and JSON only: the adapter
(`pytorch_lora_weights.safetensors` for `load_lora_weights`, `adapter_model.safetensors` for peft), `state.safetensors`
(everything that training needs to go on), `state.json`, which has the version of this format, and `manifest.json` with
the SHA-256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowcorr.errors import CheckpointError
from flowcorr.private import open_private

logger = logging.getLogger(__name__)

FORMAT = 3  # of what `save` writes and `load` reads; a change of the files that `load` could not read needs a new one
MANIFEST = "manifest.json"
_TENSORS, _FACTS = "state.safetensors", "state.json"
_STEP, _PARTIAL = "step_{:06d}", ".partial_"


class UnreadableError(CheckpointError):
    """A checkpoint that cannot be read here, and may be whole: a run that passes over it would delete it.

    The system refuses to read it, or it has another format than `FORMAT`, as an older or a newer flowcorr wrote it.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingState:
    """State from which a run resumes as if it had never stopped.

    Attributes:
        step: training steps done.
        tensors: named tensors, such as `weights/...` and `optimizer/...`.
        facts: JSON values, such as the data position.
        exported: the weights that `TrainedWeights.save` writes, in host memory; empty in a state that was loaded.
    """

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    exported: Mapping[str, Tensor] = field(default_factory=dict)

    def group(self, name: str) -> dict[str, Tensor]:
        """The tensors with names that start with `name/`, by the rest of their names."""
        prefix = name + "/"
        return {
            key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)
        }

    def on_host(self) -> TrainingState:
        """A copy in host memory, which shares nothing with the run."""
        return replace(
            self, tensors={name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()}
        )


def save(root: Path, state: TrainingState, write_adapter: Callable[[Path], None]) -> Path:
    """Write a checkpoint into `root` and return its folder.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are untouched.
    """
    final = root / _STEP.format(state.step)
    partial = root / f"{_PARTIAL}{final.name}"
    try:
        _clear_partial(root)
        partial.mkdir(parents=True)
        write_adapter(partial)
        save_file({name: tensor.contiguous() for name, tensor in state.tensors.items()}, partial / _TENSORS)
        facts = {"format": FORMAT, "step": state.step, **state.facts}
        (partial / _FACTS).write_text(json.dumps(facts, indent=1))
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        digests = {str(path.relative_to(partial)): _digest(path) for path in files}
        (partial / _FACTS).chmod(0o600)  # it holds the run's configuration
        (partial / MANIFEST).write_text(json.dumps(digests, indent=1))
        for path in partial.rglob("*"):
            _sync(path)
        _sync(partial)
        _replace(final, partial)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {state.step} could not be written to {root} ({error}); "
            f"the one before it is {_latest_name(root)}. Make room, then continue with --resume"
        ) from error
    return final


def load(folder: Path) -> TrainingState:
    """Read and verify a checkpoint.

    Raises:
        UnreadableError: it has another format, or the system refuses to read it.
        CheckpointError: a file is missing, truncated or altered.
    """
    try:
        _check_file(folder, _FACTS)
        facts = _read_json(folder, _FACTS)
        _check_format(folder, facts.pop("format", None))  # first: another format may have other files
        for name in (_TENSORS, MANIFEST):
            _check_file(folder, name)
        digests = _read_json(folder, MANIFEST)
        for name, digest in {_TENSORS: None, _FACTS: None, **digests}.items():
            _check_file(folder, name)
            if _digest(folder / name) != digest:
                raise CheckpointError(f"checkpoint {folder} is damaged: {name} does not match {MANIFEST}")
        return TrainingState(step=facts.pop("step"), tensors=load_file(folder / _TENSORS), facts=facts)
    except OSError as error:
        raise UnreadableError(
            f"checkpoint {folder} cannot be read ({error}); make it readable, or move it out of {folder.parent} to go "
            "on from an older one"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged or incomplete: {error}") from error


def _read_json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {name} is not JSON ({error})") from error


def load_latest(root: Path) -> tuple[Path, TrainingState]:
    """The newest intact checkpoint; damaged ones are skipped with a warning.

    Raises:
        UnreadableError: a checkpoint as new cannot be read; a resumed run would lose its steps, and delete it.
        CheckpointError: there is none.
    """
    all_folders = folders(root)
    if not all_folders:
        raise CheckpointError(f"{root} holds no checkpoint yet")
    damaged = []
    for folder in reversed(all_folders):
        try:
            state = load(folder)
        except UnreadableError:
            raise
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for problem in damaged:
            logger.warning("%s; %s is used instead", problem, folder)
        return folder, state
    raise CheckpointError(
        f"no checkpoint in {root} is intact; start again in another folder with --out, or restore one from a "
        f"backup: {'; '.join(damaged)}"
    )


def folders(root: Path) -> list[Path]:
    """All checkpoints in `root`, oldest first; folders of other names, such as `step_000010_keep`, do not count."""
    return [folder for _, folder in _by_step(root)]


def steps(root: Path) -> list[int]:
    """The steps of all checkpoints in `root`, in order."""
    return [step for step, _ in _by_step(root)]


def prune(root: Path, *, keep: int, best: int | None) -> None:
    """Delete all checkpoints except the newest `keep` and that of step `best`."""
    for step, folder in _by_step(root)[:-keep]:
        if step != best:
            _remove(folder)


def discard_after(root: Path, step: int) -> None:
    """Delete the checkpoints of later steps; training from `step` will write them again."""
    for later, folder in _by_step(root):
        if later > step:
            _remove(folder)


def folder_of(root: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`."""
    return root / _STEP.format(step)


def write_text(path: Path, text: str) -> None:
    """Write a small file completely or not at all; only the owner can read it, as it may hold a secret."""
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    partial.unlink(missing_ok=True)
    with open(partial, "w", encoding="utf-8", opener=open_private) as file:
        file.write(text)
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def _check_file(folder: Path, name: str) -> None:
    if not (folder / name).is_file():  # reading a pipe would wait for its writer
        raise CheckpointError(f"checkpoint {folder} is damaged or incomplete: {name} is no file")


def _check_format(folder: Path, stored: object) -> None:
    if stored == FORMAT:
        return
    has = f"checkpoint {folder} has {'no format' if stored is None else f'format {stored}'}"
    reads = f"this flowcorr reads format {FORMAT}"
    if isinstance(stored, int) and stored > FORMAT:
        raise UnreadableError(
            f"{has}, and {reads}: a newer flowcorr wrote it; update flowcorr to continue its run"
        )
    raise UnreadableError(
        f"{has}, and {reads}: an older flowcorr wrote it; continue its run with that version, or start a new run in "
        "another folder from its weights, such as model.lora.warm_start for an adapter"
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _by_step(root: Path) -> list[tuple[int, Path]]:
    named = ((path.name.partition("_")[2], path) for path in root.glob("step_*") if path.is_dir())
    return sorted((int(number), path) for number, path in named if number.isdecimal())


def _replace(final: Path, partial: Path) -> None:
    """Put `partial` in the place of a checkpoint of the same step, if there is one, and delete that one last."""
    older = _set_aside(final)
    partial.rename(final)
    _sync(final.parent)
    if older is not None:
        _delete(older)


def _remove(folder: Path) -> None:
    """Delete a checkpoint; one that the system does not let go stays, and the run goes on."""
    try:
        doomed = _set_aside(folder)
    except OSError as error:
        logger.warning("%s could not be deleted (%s); the next checkpoint tries again", folder, error)
        return
    if doomed is not None:
        _delete(doomed)


def _set_aside(folder: Path) -> Path | None:
    """Rename a checkpoint that will be deleted, so that it is never found partly deleted; None if there is none."""
    if not folder.exists():
        return None
    return folder.rename(folder.with_name(f"{_PARTIAL}{folder.name}.old"))


def _clear_partial(root: Path) -> None:
    for leftover in root.glob(f"{_PARTIAL}*"):
        _delete(leftover)


def _delete(leftover: Path) -> None:
    """Delete a folder; files that cannot be deleted, as on NFS while another process reads them, may stay."""
    try:
        shutil.rmtree(leftover)
    except OSError as error:
        logger.warning("%s could not be deleted (%s); the next checkpoint tries again", leftover, error)


def _latest_name(root: Path) -> str:
    all_folders = folders(root)
    return str(all_folders[-1]) if all_folders else "none"
