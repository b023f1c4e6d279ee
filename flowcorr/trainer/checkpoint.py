"""Checkpoints that are complete or absent: written aside, synced, renamed, and verified by digest.

A checkpoint is a folder `checkpoints/step_000010` with safetensors and JSON only:
`pytorch_lora_weights.safetensors` (for `load_lora_weights`), `state.safetensors` (everything that training
needs to go on), `state.json` and `manifest.json` with the SHA-256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowcorr.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_TENSORS, _FACTS = "state.safetensors", "state.json"
_STEP = "step_{:06d}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingState:
    """Everything that a run needs to go on as if it had never stopped.

    Attributes:
        step: training steps done.
        tensors: named tensors, such as `weights/...` and `optimizer/...`.
        facts: JSON values, such as the data position.
    """

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def group(self, name: str) -> dict[str, Tensor]:
        """The tensors whose names start with `name/`, without it."""
        prefix = name + "/"
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}


def save(root: Path, state: TrainingState, write_adapter: Callable[[Path], None]) -> Path:
    """Write a checkpoint into `root` and return its folder.

    Raises:
        CheckpointError: it could not be written; what was there before is untouched.
    """
    final = root / _STEP.format(state.step)
    partial = root / f".partial_{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_adapter(partial)
        save_file({name: tensor.contiguous() for name, tensor in state.tensors.items()}, partial / _TENSORS)
        (partial / _FACTS).write_text(json.dumps({"step": state.step, **state.facts}, indent=1))
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        digests = {str(path.relative_to(partial)): _digest(path) for path in files}
        (partial / MANIFEST).write_text(json.dumps(digests, indent=1))
        for path in partial.rglob("*"):
            _sync(path)
        _sync(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {state.step} could not be written to {root} ({error}); "
            f"the last intact one is {_name(latest(root))}. Make room, then continue with --resume"
        ) from error
    return final


def load(folder: Path) -> TrainingState:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: a file is missing, truncated or altered.
    """
    try:
        digests = json.loads((folder / MANIFEST).read_text())
        for name, digest in digests.items():
            if _digest(folder / name) != digest:
                raise CheckpointError(f"checkpoint {folder} is damaged: {name} does not match {MANIFEST}")
        facts = json.loads((folder / _FACTS).read_text())
        return TrainingState(step=facts.pop("step"), tensors=load_file(folder / _TENSORS), facts=facts)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} is incomplete: {error}") from error


def load_latest(root: Path) -> tuple[Path, TrainingState] | None:
    """The newest intact checkpoint; damaged ones are named in a warning and passed over."""
    for folder in reversed(folders(root)):
        try:
            return folder, load(folder)
        except CheckpointError as error:
            logger.warning("%s; the previous one is tried", error)
    return None


def folders(root: Path) -> list[Path]:
    """All checkpoints in `root`, oldest first."""
    return sorted(path for path in root.glob("step_*") if path.is_dir())


def latest(root: Path) -> Path | None:
    """The newest checkpoint folder, unverified."""
    found = folders(root)
    return found[-1] if found else None


def prune(root: Path, *, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and that of step `best`."""
    for folder in folders(root)[:-keep]:
        if best is None or folder.name != _STEP.format(best):
            shutil.rmtree(folder)


def folder_of(root: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`."""
    return root / _STEP.format(step)


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is whole or absent."""
    partial = path.with_name(f".partial_{path.name}")
    partial.write_text(text)
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(folder: Path | None) -> str:
    return "none" if folder is None else str(folder)
