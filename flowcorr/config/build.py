"""Plain mappings to the frozen dataclasses of the schema, and back."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from flowcorr.correction.config import RolloutCorrectionConfig
from flowcorr.errors import ConfigError, unknown_choice

T = TypeVar("T")

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


def build(section: type[T], values: Mapping[str, Any], key: str = "") -> T:
    """Make the dataclass `section` from `values`; `key` is the dotted key of the section, for messages.

    Raises:
        ConfigError: an unknown or missing key, or a value of the wrong type or out of bounds.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={values!r} must be a section of keys: {', '.join(_field_names(section))}")
    if section is RolloutCorrectionConfig:
        return section.from_mapping(values)  # type: ignore[attr-defined]
    hints = get_type_hints(section)
    for name in values:
        if name not in hints:
            raise ConfigError(unknown_choice("key", _join(key, name), [_join(key, known) for known in hints]))
    for item in fields(section):  # type: ignore[arg-type]
        required = item.default is MISSING and item.default_factory is MISSING
        if required and item.name not in values:
            raise ConfigError(f"{_join(key, item.name)} is missing and has no default; set it")
    return section(**{name: _convert(_join(key, name), value, hints[name]) for name, value in values.items()})


def to_mapping(config: Any) -> dict[str, Any]:
    """The config as plain dicts, lists and scalars; `build` makes an equal config from it."""
    return {item.name: _plain(getattr(config, item.name)) for item in fields(config)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _convert(key: str, value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        choices = [argument for argument in arguments if argument is not types.NoneType]
        # Of a number and a list, the one that the value looks like.
        alike = [choice for choice in choices if (get_origin(choice) is tuple) == _is_list(value)]
        return _convert(key, value, (alike or choices)[0])
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(unknown_choice(key, value, arguments))
        return value
    if origin is tuple:
        return _convert_tuple(key, value, arguments)
    if is_dataclass(hint):
        return build(hint, value, key)  # type: ignore[arg-type]
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value!r} must be a mapping of names to values")
        return dict(value)
    return _convert_scalar(key, value, hint)


def _convert_tuple(key: str, value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    any_length = len(arguments) == 2 and arguments[1] is Ellipsis
    wanted = "a list" if any_length else f"a list of {len(arguments)}"
    if not _is_list(value):
        raise ConfigError(f"{key}={value!r} must be {wanted}, such as [{value}]")
    if not any_length and len(value) != len(arguments):
        raise ConfigError(f"{key}={list(value)!r} must be {wanted} values")
    hints = [arguments[0]] * len(value) if any_length else arguments
    return tuple(
        _convert(f"{key}[{index}]", item, hint)
        for index, (item, hint) in enumerate(zip(value, hints, strict=True))
    )


def _convert_scalar(key: str, value: Any, hint: type) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{key}={value!r} must be {_KINDS[hint]}")
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _field_names(section: type) -> list[str]:
    return [item.name for item in fields(section)]


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
