"""What flowcorr says of a dumped run, and how that is scored beside the name that was written down."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from flowcorr import dumps
from flowcorr.instruments.audit.dumped import audit_folder
from flowcorr.instruments.doctor import examine_dump
from flowcorr.instruments.doctor.checks import CAUSES
from flowcorr.instruments.fault_words import FAULTS
from flowcorr.instruments.watch import Watch

RIGHT, UNNAMED, WRONG, SILENT = "right", "unnamed", "wrong", "silent"
_QUIET = ("healthy", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Of one instrument, the causes of its findings above a note: those that name a fault, and the others."""

    names: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()


def said_of(findings: Sequence[Any], name: str) -> Said:
    """The causes above a note; `name` counts as one that names the fault, whatever kind it is of."""
    loud = dict.fromkeys(finding.cause for finding in findings if finding.level not in _QUIET)
    known = {*CAUSES, *FAULTS, name}
    return Said(
        names=tuple(cause for cause in loud if cause in known),
        unnamed=tuple(cause for cause in loud if cause not in known),
    )


def outcome(name: str, said: Mapping[str, Said]) -> str:
    """How a bug was told: the names are those of the last instrument, of `watch`, `audit` and `doctor`, that has any.

    `audit` sends to `doctor` where a trace has several causes, so the doctor's name stands for it.
    """
    named = [found.names for found in said.values() if found.names]
    if named:
        return RIGHT if set(named[-1]) == {name} else WRONG
    return UNNAMED if any(found.unnamed for found in said.values()) else SILENT


def wilson(hits: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share. Source: Wilson, 1927, without correction for continuity."""
    if not count:
        return 0.0, 1.0
    share, square = hits / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return middle - half, middle + half


def digest_of(folder: Path) -> str:
    """A digest of the tensors of a dump; the order in its files differs from write to write."""
    made = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            made.update(json.dumps(sorted(file.metadata().items())).encode())
            for name in sorted(file.keys()):
                made.update(name.encode())
                made.update(file.get_tensor(name).numpy().tobytes())
    return made.hexdigest()


def findings_of(folder: Path, model: str) -> dict[str, list[Any]]:
    """The findings of `watch`, `audit` and `doctor` on a dump, by instrument."""
    watch, watched = Watch(), []
    for step, path in sorted(dumps.files(folder).items()):
        terms = dumps.load(path)
        watched += watch(step, **_fields(terms, dumps.load_loss(path)))[1]
    return {
        "watch": watched,
        "audit": list(audit_folder(folder).findings),
        "doctor": list(examine_dump(folder, model).findings),
    }


def _fields(terms: dumps.DumpedTerms, loss: dumps.LoggedLoss) -> dict[str, Any]:
    """A dumped step as `flowcorr.watch` takes it."""
    allowed = set(dumps.StepFields.__annotations__)
    given = {name: value for name, value in terms.tensors().items() if name in allowed}
    if terms.bypass:
        del given["old_log_probs"]
    return given | {"num_elements": terms.num_elements, "clip_ratio": loss.clip_ratio}
