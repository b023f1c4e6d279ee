"""The list of others' bugs in `bugs.yaml`, and the third of it that is held back until flowcorr is mended."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import yaml

SEED = 60
"""Draws the held third; chosen with the list, before anything ran."""
RUNS = ("loop", "reversed", "function", "release", "ours", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A bug of another project; the comment above the list says what its fields mean.

    Attributes:
        new: whether flowcorr had no such name when the list was written.
        second: whether it is on the second list.
    """

    key: str
    project: str
    where: str
    fix: str
    read: str
    run: str
    wrong: str
    at_hand: list[str]
    name: str
    new: bool = False
    second: bool = False


def read_bugs() -> dict[str, Bug]:
    """By key, in the order of the list."""
    rows = yaml.safe_load((Path(__file__).parent / "bugs.yaml").read_text(encoding="utf-8"))
    return {row["key"]: Bug(**row) for row in rows}


def held(bugs: dict[str, Bug]) -> frozenset[str]:
    """The keys of the held third, drawn among the bugs of the first list that can be run."""
    runnable = sorted(key for key, bug in bugs.items() if bug.run != "none" and not bug.second)
    return frozenset(random.Random(SEED).sample(runnable, len(runnable) // 3))
