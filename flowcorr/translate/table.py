"""Tables that map the keys of another trainer's configuration to those of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from flowcorr.config import Config, to_mapping, yaml_text
from flowcorr.config.build import KINDS
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import ConfigError
from flowcorr.translate.unread import unread_in

Get = Callable[[str], Any]
_SHOWN = 4
_CORRECTION = {"algorithm.rollout_correction": to_mapping(RolloutCorrectionConfig())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One key of a recipe.

    Attributes:
        key: the dotted key of the recipe.
        sources: the other trainer's keys from which it follows; none if that trainer always behaves so.
        value: computes its value from `get`, which returns the value of a key of the other trainer; None leaves the
            line out.
        note: an addition to the comment, or a function that makes it from `get`.
        always: write the line even if the value is flowcorr's default.
    """

    key: str
    value: Callable[[Get], Any]
    sources: tuple[str, ...] = ()
    note: str | Callable[[Get], str] = ""
    always: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A trainer's configuration.

    Attributes:
        name: name of the trainer.
        defaults: default values of the keys that are read; a given value must be of the same type.
        kinds: types of keys where the default does not tell it; `object` is any.
        required: keys that every configuration of the trainer holds.
        sections: keys that hold a section of names which the user chooses, read as a whole.
        rows: the keys that are translated.
        no_place: patterns of keys without an equivalent, with the reason; the first match counts.
        differences: differences in the maths that no configuration removes.
        refuse: returns why flowcorr cannot run a configuration, or an empty string.
    """

    name: str
    defaults: Mapping[str, Any]
    kinds: Mapping[str, type]
    required: Sequence[str]
    sections: tuple[str, ...]
    rows: Sequence[Row]
    no_place: Mapping[str, str]
    differences: Sequence[str]
    refuse: Callable[[Get], str]


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
        no_line: given keys that are read, and are as they are here anyway, or without effect beside the others.
        no_place: given keys without an equivalent, by reason.
        unknown: given keys that are not in the table.
        differences: see `Table`.
    """

    lines: Mapping[str, Line]
    sources: AbstractSet[str]
    no_line: Sequence[str]
    no_place: Mapping[str, Sequence[str]]
    unknown: Sequence[str]
    differences: Sequence[str] = field(default_factory=tuple)


def translate_values(given: Mapping[str, Any], table: Table) -> Translation:
    """Translate the `given` keys with a table.

    Raises:
        ConfigError: it is no configuration of that trainer, flowcorr cannot run it, or a value that it needs is unread;
            the message says why.
    """

    def get(key: str) -> Any:
        default = table.defaults[key]
        value = given.get(key, default)
        if unread := next(unread_in(value), None):
            raise ConfigError(f"{key} is not known: {unread.reason}")
        if value is None and default is None:
            return None
        return _typed(key, value, table.kinds.get(key, object if default is None else type(default)))

    check_required(given, table.required, table.name)
    if reason := table.refuse(get):
        raise ConfigError(reason)
    ours = _flat({**to_mapping(Config()), **_CORRECTION})
    lines: dict[str, Line] = {}
    sources: set[str] = set()
    for row in table.rows:
        value = row.value(get)
        there = [source for source in row.sources if source in given]
        if value is None or (value == ours.get(row.key) and not there and not row.always):
            continue
        note = row.note if isinstance(row.note, str) else row.note(get)
        lines[row.key] = Line(value=value, comment=_comment(row, there, ours.get(row.key), table.name, note))
        sources |= {*row.sources}
    no_line: list[str] = []
    no_place: dict[str, list[str]] = {}
    unknown: list[str] = []
    for key, value in given.items():
        if key in sources:
            continue
        why = next((text for pattern, text in table.no_place.items() if fnmatchcase(key, pattern)), None)
        if key in table.defaults:
            no_line.append(f"{key}={value}")
        elif why is None:
            unknown.append(f"{key}={value}")
        else:
            no_place.setdefault(why, []).append(f"{key}={value}")
    return Translation(
        lines=lines,
        sources=sources,
        no_line=no_line,
        no_place=no_place,
        unknown=unknown,
        differences=table.differences,
    )


def check_required(given: Mapping[str, Any], required: Sequence[str], name: str) -> None:
    """Refuse a configuration that lacks keys which every one of a trainer holds, so that it is of something else."""
    if missing := [key for key in required if key not in given]:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        raise ConfigError(f"it is no configuration of {name}, which would hold {shown}")


def decay_of_one(decay: float, updates: float) -> float:
    """The decay of an average of every update that forgets as fast as one of `decay` every `updates` updates."""
    return min(round(decay ** (1 / updates), 6), 0.999999)


def same(source: str, key: str, note: str | Callable[[Get], str] = "") -> Row:
    """A key of a recipe that has the value of a key of the other trainer."""
    return Row(key=key, value=lambda get: get(source), sources=(source,), note=note)


def _typed(key: str, value: Any, kind: type) -> Any:
    """A value as what its key needs: whole numbers for numbers, a list for the text of one.

    Raises:
        ConfigError: it is of another type, or a number that is not finite.
    """
    if kind is float and type(value) is float and not math.isfinite(value):
        raise ConfigError(f"{key}={value!r} must be a finite number")
    if kind in (object, type(value)):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    if kind is bool and value in (0, 1):
        return bool(value)
    if kind is list and isinstance(value, tuple):
        return list(value)
    if kind is list and isinstance(value, str):
        found = yaml_text.parse(value) if value.startswith("[") else value
        return found if isinstance(found, list) else [found]
    raise ConfigError(f"{key}={value!r} must be {KINDS[kind]}")


def _comment(row: Row, there: Sequence[str], ours: Any, name: str, note: str) -> str:
    if not row.sources:
        text = f"{name} always does this; default here: {_text(ours)}"
    elif there:
        text = ", ".join(there)
    else:
        text = f"{name}'s default of {row.sources[0]}; default here: {_text(ours)}"
    return f"{text} ({note})" if note else text


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat
