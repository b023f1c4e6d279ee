"""Every configuration key with its default, its choices and its sentence, read from the dataclasses of the schema."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from flowcorr.config.schema import Config
from flowcorr.correction import MEASURED, RolloutCorrectionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One configuration key.

    Attributes:
        name: dotted.
        meaning: from the docstring of its section.
        choices: its type, or the values that it takes.
        default: as YAML would write it.
    """

    name: str
    meaning: str
    choices: str
    default: str


def keys(section: type = Config, prefix: str = "") -> Iterator[Key]:
    """All keys below a section, in the order of the schema; keys of list items once, at the first such list."""
    meanings, hints = meanings_of(section), typing.get_type_hints(section)
    listed: set[type] = set()
    for field in dataclasses.fields(section):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if (nested := _nested(hint)) is not None:
            if field.default is MEASURED:
                default = "{preset: disabled}"
                yield Key(name=name, meaning=meanings[field.name], choices="mapping | null", default=default)
            yield from keys(nested, f"{name}.")
            continue
        is_preset = (section, field.name) == (RolloutCorrectionConfig, "preset")
        yield Key(
            name=name,
            meaning=meanings.get(field.name, ""),
            choices="the name of a preset" if is_preset else _choices(hint),
            default="null" if is_preset else _default(field),
        )
        item = _nested(next(iter(typing.get_args(hint)), None)) if typing.get_origin(hint) is tuple else None
        if item is not None and item not in listed:
            listed.add(item)
            yield from keys(item, f"{name}[].")


def find_key(name: str) -> Key | None:
    """The key of that dotted name, or the only key that ends in it."""
    every = list(keys())
    matches = [key for key in every if key.name == name]
    matches = matches or [key for key in every if key.name.endswith(f".{name}")]
    return matches[0] if len(matches) == 1 else None


def meanings_of(described: Any, heading: str = "Attributes") -> dict[str, str]:
    """The sentences under `Attributes:`, or another heading, of a docstring; `height, width: ...` counts for both."""
    text = inspect.getdoc(described) or ""
    _, _, attributes = text.partition(f"{heading}:\n")
    attributes = attributes.split("\n\n")[0]
    meanings: dict[str, str] = {}
    for names, meaning in re.findall(
        r"^    ([\w, ]+): (.*(?:\n        .*)*)", attributes, flags=re.MULTILINE
    ):
        meanings |= {name.strip(): " ".join(meaning.split()) for name in names.split(",")}
    return meanings


def _nested(hint: Any) -> type | None:
    """The section that a hint names, if it names one."""
    return next((part for part in _parts(hint) if isinstance(part, type) and is_dataclass(part)), None)


def _parts(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(part for option in typing.get_args(hint) for part in _parts(option))
    return (hint,)


def _choices(hint: Any) -> str:
    return " | ".join(dict.fromkeys(_written(part) for part in _parts(hint)))


def _written(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        items = [part for part in typing.get_args(hint) if part is not Ellipsis]
        return f"list of {_choices(items[0])}"
    names = {type(None): "null", bool: "true | false", int: "integer", float: "number", str: "text"}
    return names.get(hint, "mapping")


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_item, value))}]"
    return "null" if value is None else "{}" if value == {} else str(value) or '""'


def _item(value: Any) -> str:
    """An item of a list; of a section, the keys that differ from their defaults."""
    if not is_dataclass(value):
        return str(value)
    shown = [
        f"{field.name}: {own}"
        for field in dataclasses.fields(value)
        if (own := getattr(value, field.name)) not in (field.default, {})
    ]
    return "{" + ", ".join(shown) + "}"
