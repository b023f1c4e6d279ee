"""A `Finding`: one thing that was found, with its evidence and its remedy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flowcorr.config import dotted, yaml_text

Level = Literal["serious", "warning", "note", "healthy"]
LEVELS: tuple[Level, ...] = ("serious", "warning", "note", "healthy")
"""The worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found; `str` makes a line for a log of it.

    Attributes:
        level: how bad it is.
        cause: its name; `flowcorr explain` knows those of rules, checks and faults.
        sentence: what was found, without a full stop.
        reason: why it is no healthy state, where the sentence needs one; without a full stop.
        numbers: what tells it, by name: values, limits, steps, the run.
        remedy: what to do, without a full stop.
        keys: lines of YAML that load on top of the recipe at hand.
        fault: whether only a fault explains it, so that a training run stops there, see `trainer.on_fault`.
    """

    level: Level
    cause: str
    sentence: str
    reason: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""
    keys: str = ""
    fault: bool = False

    @property
    def text(self) -> str:
        """The sentence, with its reason."""
        return f"{self.sentence}; {self.reason}" if self.reason else self.sentence

    @property
    def evidence(self) -> str:
        """The numbers in words."""
        return ", ".join(f"{name} {shown(value)}" for name, value in self.numbers.items())

    @property
    def overrides(self) -> str:
        """The keys as arguments of a command."""
        return as_overrides(self.keys)

    def __str__(self) -> str:
        text = f"{self.level}: {self.text}"
        text += f" ({self.evidence})" if self.numbers else ""
        return f"{text}; {self.remedy}" if self.remedy else text


def shown(value: Any) -> str:
    """A value in few characters; `-` for None, and blanks between several."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return " ".join(map(shown, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def worst(levels: Iterable[Level]) -> Level:
    """The worst of some levels; `healthy` without any."""
    return min(levels, key=LEVELS.index, default="healthy")


def as_overrides(keys: str) -> str:
    """The keys of a finding as arguments of a command; a correction takes the place of the recipe's own."""
    sections = yaml_text.parse(keys) or {}
    correction = sections.get("algorithm", {}).pop("rollout_correction", None)
    given: dict[str, Any] = {}
    if correction is not None:
        given["algorithm.rollout_correction"] = None
        given |= {f"algorithm.rollout_correction.{key}": value for key, value in correction.items()}
    own = dotted({section: keys for section, keys in sections.items() if keys})
    return shlex.join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in (own | given).items()
    )


def keys_of(overrides: str) -> str:
    """The keys of a finding from arguments of a command, `dotted.key=value` with blanks between them."""
    values: dict[str, Any] = {}
    for override in overrides.split():
        key, _, text = override.partition("=")
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = yaml_text.parse(text)
    return yaml_text.dump(values)
