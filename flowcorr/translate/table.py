"""Tables that map the keys of another trainer's configuration to keys of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import UnionType
from typing import Any

from flowcorr.config import defaults, dotted
from flowcorr.config.build import KINDS
from flowcorr.config.yaml_text import leaves
from flowcorr.errors import ConfigError, unknown_choice

_MISSING = object()
TRACKERS = ("tensorboard", "wandb", "swanlab")
"""Trackers that flowcorr has too, under the same names."""
WHOLE_RUN = ALL_PROMPTS = 100_000
"""Training steps of a run that ends when it is stopped, and held-out prompts of an evaluation of all of them."""
_SHOWN = 4
_DTYPES = {
    "no": "float32",
    "fp32": "float32",
    "float32": "float32",
    "fp16": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}
_OURS = dotted(defaults())


class Given:
    """A configuration of another trainer: `given("train.seed")` is the value of a key.

    Attributes:
        asked: the keys that were asked for.
    """

    def __init__(self, values: Mapping[str, Any], absent: Mapping[str, Any], trainer: str) -> None:
        self.asked: set[str] = set()
        self._values, self._absent, self._trainer = values, absent, trainer

    def __contains__(self, key: str) -> bool:
        return _at(self._values, key) is not _MISSING

    def __call__(self, key: str, kind: Any = object) -> Any:
        """The value of a key, or its default in the other trainer.

        Args:
            key: a dotted key, of a value or of a section.
            kind: the type that it must have, such as `int`, or `int | None` where it may be null. By default that of
                the number that counts where the key is absent, or any.

        Raises:
            ConfigError: the key is absent and has no default, or its value is not resolved, not finite or not a `kind`.
        """
        self.asked.add(key)
        value, default = _at(self._values, key), self._absent.get(key)
        if value is _MISSING:
            if key not in self._absent:
                raise ConfigError(
                    f"it does not hold {key}, as every resolved configuration of {self._trainer} does"
                )
            return self._absent[key]
        for part in leaves(value):
            if isinstance(part, str) and ("$" in part or part == "???"):
                raise ConfigError(f"{key}={part} is not resolved; give its value as an override, {key}=VALUE")
            if isinstance(part, float) and not math.isfinite(part):
                raise ConfigError(f"{key}={part} must be a finite number")
        if isinstance(kind, UnionType):
            if value is None:
                return None
            kind = kind.__args__[0]
        if kind is object and isinstance(default, int | float) and not isinstance(value, list | dict):
            kind = type(default)
        if isinstance(value, kind) and not (isinstance(value, bool) and kind in (int, float)):
            return value
        if kind is float and type(value) is int:
            return float(value)
        if kind is int and type(value) is float and value.is_integer():
            return int(value)
        if kind is bool and value in (0, 1):
            return bool(value)
        if kind is list and value is not None:
            return [value]
        raise ConfigError(f"{key}={value!r} must be {KINDS[kind]}")

    def plain(self, key: str) -> Any:
        """The value of a key, or its default in the other trainer, or None; it is not checked."""
        value = _at(self._values, key)
        return self._absent.get(key) if value is _MISSING else value


@dataclass(frozen=True, slots=True)
class Row:
    """A value of a recipe that is not just that of one key of the other trainer.

    Attributes:
        sources: the other trainer's keys from which it follows; none if that trainer always behaves so.
        value: the value; None leaves the line out.
        note: an addition to the comment.
    """

    sources: str | tuple[str, ...]
    value: Any
    note: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The sources."""
        return (self.sources,) if isinstance(self.sources, str) else self.sources


@dataclass(frozen=True, slots=True)
class Left:
    """Keys without an equivalent that may change learning, sampling, rewards or evaluations.

    Attributes:
        pattern: a pattern of their names.
        reason: why they are left out, or where it is set here.
        neutral: values that change nothing, besides null; without them, false, 0 and what is empty do not.
        like: another key, which counts here; an equal value changes nothing. Its `*` stands for that of the pattern.
        when: whether they may change something beside the other keys.
    """

    pattern: str
    reason: str
    neutral: tuple[Any, ...] = ()
    like: str = ""
    when: Callable[[Given], Any] = lambda get: True

    def changes(self, key: str, value: Any, get: Given) -> bool:
        """Whether a value of one of the keys may change something."""
        if value is None or not self.when(get):
            return False
        if self.like:
            beginning, _, end = self.pattern.partition("*")
            return value != get.plain(self.like.replace("*", key[len(beginning) : len(key) - len(end)]))
        return value not in self.neutral if self.neutral else bool(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A trainer's configuration.

    Attributes:
        name: name of the trainer.
        required: keys that tell a configuration of the trainer from others.
        absent: values of keys that a configuration may lack.
        foreign: returns why flowcorr has no such trainer or model, or an empty string; asked before all else.
        only: values with an equivalent, of keys that have no other.
        refuse: returns why flowcorr cannot run a configuration, or an empty string.
        rows: returns the recipe by its dotted keys, in their order: the key that has the same meaning there, or a row.
        left: keys that are not, and may change learning, sampling, rewards or evaluations; the first match counts.
        apart: patterns of keys that change none of these in any configuration that is translated: workers, memory,
            folders, profiling, other algorithms. A key of no pattern is unknown, and named if it is set.
        differences: differences in the maths that no configuration removes.
    """

    name: str
    required: Sequence[str]
    absent: Mapping[str, Any]
    foreign: Callable[[Given], str]
    only: Mapping[str, tuple[Any, ...]]
    refuse: Callable[[Given], str]
    rows: Callable[[Given], Mapping[str, str | Row]]
    left: Sequence[Left]
    apart: Sequence[str]
    differences: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a recipe: a value, and a comment on its source."""

    value: Any
    comment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A recipe in parts; every given key is in one of them.

    Attributes:
        lines: the lines of the recipe, by dotted key.
        sources: the other trainer's keys, given or not, from which these lines follow.
        left: given keys that are not carried over and may matter, by reason.
        without_effect: the other given keys: not set, neutral, of no effect beside others, or of nothing that is
            learned, sampled or scored.
        differences: see `Table`.
    """

    lines: Mapping[str, Line]
    sources: AbstractSet[str]
    left: Mapping[str, Sequence[str]]
    without_effect: Sequence[str]
    differences: Sequence[str] = field(default_factory=tuple)


def translate_values(values: Mapping[str, Any], table: Table) -> Translation:
    """Translate a configuration, nested sections of keys, with a table.

    Raises:
        ConfigError: it is no configuration of that trainer, flowcorr cannot run it, or a value that it needs is not
            resolved; the message says why.
    """
    get = Given(values, table.absent, table.name)
    if missing := [key for key in table.required if key not in get]:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        raise ConfigError(f"it is no configuration of {table.name}, which would hold {shown}")
    if reason := table.foreign(get):
        raise ConfigError(reason)
    for key, known in table.only.items():
        if get(key) not in known:
            names = ", ".join(str(value) for value in known if value)
            hint = f"; flowcorr translates {names}" if names else ""
            raise ConfigError(f"{key}={get(key)} has no equivalent here{hint}")
    if reason := table.refuse(get):
        raise ConfigError(reason)
    rows = {key: row if isinstance(row, Row) else Row(row, get(row)) for key, row in table.rows(get).items()}
    lines: dict[str, Line] = {}
    sources: set[str] = set()
    for key, row in rows.items():
        ours = _OURS.get(key)
        there = [source for source in row.keys if source in get]
        if row.value is None or (row.value == ours and not there):
            continue
        lines[key] = Line(value=row.value, comment=_comment(row, there, ours, table.name))
        sources.update(row.keys)
    read = get.asked.union(*(row.keys for row in rows.values()))
    left: dict[str, list[str]] = {}
    without_effect = []
    compared = {rule.pattern for rule in table.left if rule.like}
    by_default = [(key, value) for key, value in table.absent.items() if key in compared and key not in get]
    for key, value in (*set_values(values), *by_default):
        if covers(sources, key):
            continue
        reason = "" if covers(read, key) else _reason(key, value, table, get)
        shown = f"{key}={value}" + ("" if key in get else f", {table.name}'s default")
        if reason:
            left.setdefault(reason, []).append(shown)
        elif key in get:
            without_effect.append(shown)
    return Translation(
        lines=lines, sources=sources, left=left, without_effect=without_effect, differences=table.differences
    )


def covers(keys: AbstractSet[str], key: str) -> bool:
    """Whether a key, or a section that it is in, is among `keys`."""
    parts = key.split(".")
    return any(".".join(parts[:count]) in keys for count in range(1, len(parts) + 1))


def set_values(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All values by their dotted keys, but for the classes that Hydra makes of sections."""
    return ((key, value) for key, value in dotted(values).items() if not f".{key}".endswith("._target_"))


def under(section: str, names: str) -> tuple[str, ...]:
    """The dotted keys of a section with these names, which blanks separate."""
    return tuple(f"{section}.{name}" for name in names.split())


def too_small(get: Given, counts: Sequence[str], images_of_a_prompt: str) -> str:
    """Why a run is too small for flowcorr, or an empty string.

    Args:
        get: the configuration.
        counts: keys whose numbers must be at least 1.
        images_of_a_prompt: the key of a number that must be at least 2.
    """
    for key in counts:
        if get(key, int) < 1:
            return f"{key}={get(key)} must be at least 1"
    if get(images_of_a_prompt, int) < 2:
        number = f"{images_of_a_prompt}={get(images_of_a_prompt)}"
        return f"{number} gives an image no other to be compared with; use 2 or more"
    return ""


def dtype_of(get: Given, key: str) -> str:
    """A dtype by its name here; null is float32. Raises `ConfigError` for none."""
    name = "no" if get(key) is None else str(get(key)).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(unknown_choice(key, name, _DTYPES))
    return _DTYPES[name]


def decay_of_one(decay: float, updates: float) -> float:
    """The decay of an average of every update that forgets as fast as one of `decay` every `updates` updates."""
    return min(round(decay ** (1 / updates), 6), 0.999999)


def _reason(key: str, value: Any, table: Table, get: Given) -> str:
    """Why a key that may matter is not carried over; empty if its value changes nothing."""
    rule = next((rule for rule in table.left if fnmatchcase(key, rule.pattern)), None)
    if rule is not None:
        return rule.reason if rule.changes(key, value, get) else ""
    is_set = value is not None and value not in ("", [], {})
    return (
        "unknown to flowcorr translate"
        if is_set and not any(fnmatchcase(key, pattern) for pattern in table.apart)
        else ""
    )


def _comment(row: Row, there: Sequence[str], ours: Any, name: str) -> str:
    if not row.keys:
        text = f"{name} always does this; default here: {_text(ours)}"
    elif there:
        text = ", ".join(there)
    else:
        text = f"{name}'s default of {row.keys[0]}; default here: {_text(ours)}"
    return f"{text} ({row.note})" if row.note else text


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return _MISSING
        values = values[name]
    return values
