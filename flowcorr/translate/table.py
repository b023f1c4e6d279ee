"""Tables that map the keys of another trainer's configuration to those of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from flowcorr.config import Config, to_mapping, yaml_text
from flowcorr.config.build import KINDS
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import ConfigError
from flowcorr.translate.unread import unread_in

Get = Callable[[str], Any]
_CORRECTION = {"algorithm.rollout_correction": to_mapping(RolloutCorrectionConfig())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One key of a recipe.

    Attributes:
        key: the dotted key of the recipe.
        sources: the other trainer's keys from which it follows; none if that trainer always behaves so.
        value: computes its value from `get`, which returns the value of a key of the other trainer; None leaves the
            line out.
        note: an addition to the comment.
        always: write the line even if the value is flowcorr's default.
    """

    key: str
    value: Callable[[Get], Any]
    sources: tuple[str, ...] = ()
    note: str = ""
    always: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A trainer's configuration.

    Attributes:
        name: name of the trainer.
        defaults: default values of the keys that rows read; a given value must be of the same type.
        kinds: types of keys where the default does not tell it; `object` is any.
        rows: the keys that are translated.
        no_place: patterns of keys without an equivalent, with the reason; the first match counts.
        differences: differences in the maths that no configuration removes.
        refuse: returns why flowcorr cannot run a configuration, or an empty string.
    """

    name: str
    defaults: Mapping[str, Any]
    kinds: Mapping[str, type]
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
    """A recipe in parts.

    Attributes:
        lines: the lines of the recipe, by dotted key.
        no_place: given keys without an equivalent, by reason.
        unknown: given keys that are not in the table.
        differences: see `Table`.
    """

    lines: Mapping[str, Line]
    no_place: Mapping[str, Sequence[str]]
    unknown: Sequence[str]
    differences: Sequence[str] = field(default_factory=tuple)


def translate_values(given: Mapping[str, Any], table: Table) -> Translation:
    """Translate the `given` keys with a table.

    Raises:
        ConfigError: flowcorr cannot run the configuration, or a value that it needs is unread; the message says why.
    """

    def get(key: str) -> Any:
        default = table.defaults.get(key)
        value = given.get(key, default)
        if unread := next(unread_in(value), None):
            raise ConfigError(f"{key} is not known: {unread.reason}")
        if value is None and default is None:
            return None
        return _typed(key, value, table.kinds.get(key, object if default is None else type(default)))

    if reason := table.refuse(get):
        raise ConfigError(reason)
    ours = _flat({**to_mapping(Config()), **_CORRECTION})
    lines: dict[str, Line] = {}
    for row in table.rows:
        value = row.value(get)
        there = [source for source in row.sources if source in given]
        if value is None or (value == ours.get(row.key) and not there and not row.always):
            continue
        lines[row.key] = Line(value=value, comment=_comment(row, there, ours.get(row.key), table.name))
    read = {source for row in table.rows for source in row.sources} | table.defaults.keys()
    no_place: dict[str, list[str]] = {}
    unknown: list[str] = []
    for key, value in given.items():
        if key in read:
            continue
        found = next((text for pattern, text in table.no_place.items() if fnmatchcase(key, pattern)), None)
        if found is None:
            unknown.append(f"{key}={value}")
        else:
            no_place.setdefault(found, []).append(f"{key}={value}")
    return Translation(lines=lines, no_place=no_place, unknown=unknown, differences=table.differences)


def _typed(key: str, value: Any, kind: type) -> Any:
    """A value as what its key needs: whole numbers for numbers, a list for the text of one.

    Raises:
        ConfigError: it is of another type.
    """
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


def _comment(row: Row, there: Sequence[str], ours: Any, name: str) -> str:
    if not row.sources:
        text = f"{name} always does this; default here: {_text(ours)}"
    elif there:
        text = ", ".join(there)
    else:
        text = f"{name}'s default of {row.sources[0]}; default here: {_text(ours)}"
    return f"{text} ({row.note})" if row.note else text


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat
