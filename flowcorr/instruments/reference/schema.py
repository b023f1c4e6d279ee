"""The JSON schema of recipes, by which editors complete keys and mark mistakes, read from the dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from flowcorr.config import to_mapping
from flowcorr.config.older_verl import FLAT_KEYS
from flowcorr.config.schema import AlgorithmConfig, Config
from flowcorr.correction import MEASURED, RolloutCorrectionConfig
from flowcorr.correction.presets import NAMES

Schema = dict[str, Any]

_SCALARS: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number"}
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}  # OmegaConf's, such as ${sampling.height}
_OLDER = "a key of an older dialect of verl, which is translated with a warning"


def recipe_schema() -> Schema:
    """The schema of a recipe, draft 2020-12. Combinations of keys, and files, are checked by `flowcorr config`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of flowcorr",
        **_section(Config),
    }


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


def _section(section: type) -> Schema:
    """The schema of a section of keys."""
    hints, meanings = typing.get_type_hints(section), meanings_of(section)
    properties, required = {}, []
    for field in dataclasses.fields(section):
        entry = _of_hint(hints[field.name])
        if field.default is MEASURED:  # null computes nothing
            entry = {"anyOf": [entry, {"type": "null"}]}
        if meaning := meanings.get(field.name):
            entry["description"] = meaning
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING:
            required.append(field.name)
        elif not dataclasses.is_dataclass(default):
            entry["default"] = _as_json(default)
        properties[field.name] = entry
    if section is RolloutCorrectionConfig:
        properties["preset"]["anyOf"] = [{"enum": list(NAMES)}, {"type": "null"}]
    if section in (AlgorithmConfig, RolloutCorrectionConfig):
        older = {"deprecated": True, "description": _OLDER}
        properties |= {key: older for key in FLAT_KEYS if key not in properties}
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _of_hint(hint: Any) -> Schema:
    """The schema of the values that a type hint allows."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of_hint(argument) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        items = _of_hint(arguments[0])
        if arguments[-1] is Ellipsis:
            return {"type": "array", "items": items}
        return {"type": "array", "items": items, "minItems": len(arguments), "maxItems": len(arguments)}
    if dataclasses.is_dataclass(hint):
        return _section(typing.cast(type, hint))
    if origin is Mapping:
        return {"type": "object"}
    if hint is Any:
        return {}
    if hint is types.NoneType:
        return {"type": "null"}
    if hint is str:
        return {"type": "string"}
    return {"anyOf": [{"type": _SCALARS[hint]}, INTERPOLATION]}


def _as_json(default: Any) -> Any:
    if isinstance(default, tuple):
        return [to_mapping(item) if dataclasses.is_dataclass(item) else _as_json(item) for item in default]
    return default
