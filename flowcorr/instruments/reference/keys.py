"""Every configuration key with its default, its choices and its sentence, read from the schema of recipes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowcorr.instruments.reference.schema import INTERPOLATION, Schema, recipe_schema

_TYPES = {"boolean": "true | false", "string": "text", "object": "mapping"}


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


def keys(section: Schema | None = None, prefix: str = "") -> Iterator[Key]:
    """All keys below a section, in the order of the schema; keys of list items once, at the first such list."""
    section = recipe_schema() if section is None else section
    listed: list[Schema] = []
    for key, entry in section["properties"].items():
        if entry.get("deprecated"):
            continue
        name, meaning, options = f"{prefix}{key}", entry.get("description", ""), _options(entry)
        nested = next((option for option in options if "properties" in option), None)
        if nested is not None:
            if {"type": "null"} in options:
                default = "{preset: disabled}"
                yield Key(name=name, meaning=meaning, choices="mapping | null", default=default)
            yield from keys(nested, f"{name}.")
            continue
        is_preset = name == "algorithm.rollout_correction.preset"
        yield Key(
            name=name,
            meaning=meaning,
            choices="the name of a preset" if is_preset else _choices(entry),
            default="required" if key in section.get("required", ()) else _default(entry),
        )
        item = entry.get("items", {})
        if "properties" in item and item not in listed:
            listed.append(item)
            yield from keys(item, f"{name}[].")


def find_key(name: str) -> Key | None:
    """The key of that dotted name, or the only key that ends in it."""
    every = list(keys())
    matches = [key for key in every if key.name == name]
    matches = matches or [key for key in every if key.name.endswith(f".{name}")]
    return matches[0] if len(matches) == 1 else None


def _options(entry: Schema) -> list[Schema]:
    """The kinds of values that an entry allows."""
    if "anyOf" in entry:
        return [option for part in entry["anyOf"] for option in _options(part)]
    return [] if entry == INTERPOLATION else [entry]


def _choices(entry: Schema) -> str:
    return " | ".join(dict.fromkeys(map(_written, _options(entry))))


def _written(option: Schema) -> str:
    if "enum" in option:
        return " | ".join(map(str, option["enum"]))
    kind: str = option["type"]
    return f"list of {_choices(option['items'])}" if kind == "array" else _TYPES.get(kind, kind)


def _default(entry: Schema) -> str:
    value = entry["default"]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_item(item, entry['items']) for item in value)}]"
    return "null" if value is None else "{}" if value == {} else str(value) or '""'


def _item(value: Any, entry: Schema) -> str:
    """An item of a list; of a section, the keys that differ from their defaults."""
    if not isinstance(value, dict):
        return str(value)
    own = (f"{key}: {item}" for key, item in value.items() if item != entry["properties"][key].get("default"))
    return "{" + ", ".join(own) + "}"
