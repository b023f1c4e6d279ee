"""Plain mappings to the frozen dataclasses of the schema, and back."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from flowcorr.correction import OFF, RolloutCorrectionConfig
from flowcorr.correction.presets import NAMES
from flowcorr.errors import ConfigError, unknown_choice

T = TypeVar("T")

_EXACT = 2.0**53  # below it, a float is the whole number that was written, such as 1e2
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a section of keys",
}
"""The kinds of values in words, for messages."""
_NO_CACHE = "caching of blocks was removed, since its images are those of another sampler; leave this key out"
_REMOVED = {"rollout.cache": _NO_CACHE, "rollout.cache_threshold": _NO_CACHE}
_LISTS: dict[Any, str] = {
    tuple[int, int]: "a list of 2 whole numbers, such as [0, 4]",
    tuple[float, float]: "a list of 2 numbers, such as [0.9, 0.99]",
    tuple[float, ...]: "a list of numbers, such as [1e-4, 1e-4]",
}


def build(section: type[T], values: Mapping[str, Any], key: str = "") -> T:
    """Make the dataclass `section` from `values`; `key` is the dotted key of the section, for messages.

    Raises:
        ConfigError: an unknown or missing key, or a value of the wrong type or out of bounds.
    """
    if section is RolloutCorrectionConfig and values is None:
        return OFF
    if not isinstance(values, Mapping):
        preset = section is RolloutCorrectionConfig and isinstance(values, str) and values in NAMES
        hint = f" (did you mean {key}.preset={values}?)" if preset else ""
        raise ConfigError(
            f"{key}={values!r} must be a section of keys{hint}: {', '.join(_field_names(section))}"
        )
    if section is RolloutCorrectionConfig:
        return section.from_mapping(values)  # type: ignore[attr-defined]
    hints = get_type_hints(section)
    for name in values:
        if name not in hints:
            raise ConfigError(_unknown_key(section, name, key))
    for item in fields(section):  # type: ignore[arg-type]
        required = item.default is MISSING and item.default_factory is MISSING
        if required and item.name not in values:
            raise ConfigError(f"{_join(key, item.name)} is missing and has no default; set it")
    return section(**{name: _convert(_join(key, name), value, hints[name]) for name, value in values.items()})


def to_mapping(config: Any) -> dict[str, Any]:
    """The config as plain dicts, lists and scalars; `build` makes an equal config from it."""
    return {item.name: _plain(getattr(config, item.name)) for item in fields(config)}


def _unknown_key(section: type, name: str, key: str) -> str:
    dotted = _join(key, name)
    if dotted in _REMOVED:
        return f"{dotted}: {_REMOVED[dotted]}"
    places = [] if key else _places(section, name)
    if places:
        sections = ", ".join(_field_names(section))
        return f"key={name!r} is unknown (did you mean {' or '.join(places)}?); choose from {sections}"
    return unknown_choice("key", dotted, [_join(key, known) for known in _field_names(section)])


def _places(section: type, name: str, key: str = "") -> list[str]:
    """Dotted keys of all fields `name` in `section` and nested sections; sections in lists are not searched."""
    places = [_join(key, name)] if name in _field_names(section) else []
    for known, hint in get_type_hints(section).items():
        for inner in filter(is_dataclass, _choices(hint)):
            places += _places(inner, name, _join(key, known))  # type: ignore[arg-type]
    return places


def _plain(value: Any) -> Any:
    if value == OFF:
        return None
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
    if _is_union(hint):
        return None if value is None and types.NoneType in arguments else _convert_union(key, value, hint)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(unknown_choice(key, value, arguments))
        return value
    if origin is tuple:
        return _convert_tuple(key, value, hint)
    if is_dataclass(hint):
        return build(hint, value, key)  # type: ignore[arg-type]
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value!r} must be a mapping of names to values")
        for name in value:
            if not isinstance(name, str):
                raise ConfigError(
                    f"{key} has the key {name!r}, and its names must be text; put it into quotes"
                )
        return dict(value)
    return _convert_scalar(key, value, hint)


def _convert_union(key: str, value: Any, hint: Any) -> Any:
    """Choose between a number and a list by the look of the value; a word next to `true` and `false` is kept."""
    choices = _choices(hint)
    words = [word for choice in choices if get_origin(choice) is Literal for word in get_args(choice)]
    if words and len(choices) > 1:
        first = next(choice for choice in choices if get_origin(choice) is not Literal)
        return value if value in words else _convert_scalar(key, value, first, f", or {', '.join(words)}")
    lists = [choice for choice in choices if get_origin(choice) is tuple]
    others = [choice for choice in choices if choice not in lists]
    if not lists or not others:
        return _convert(key, value, choices[0])
    if _is_list(value):
        return _convert(key, value, lists[0])
    return _convert_scalar(key, value, others[0], or_list=f", or {_list_kind(lists[0], value)}")


def _convert_tuple(key: str, value: Any, hint: Any) -> tuple[Any, ...]:
    arguments = get_args(hint)
    any_length = len(arguments) == 2 and arguments[1] is Ellipsis
    if not _is_list(value):
        raise ConfigError(f"{key}={value!r} must be {_list_kind(hint, value)}")
    if not any_length and len(value) != len(arguments):
        raise ConfigError(f"{key}={list(value)!r} must be {_list_kind(hint, value)}")
    hints = [arguments[0]] * len(value) if any_length else arguments
    return tuple(
        _convert(f"{key}[{index}]", item, hint)
        for index, (item, hint) in enumerate(zip(value, hints, strict=True))
    )


def _list_kind(hint: Any, value: Any) -> str:
    """The list that `hint` allows, with an example as it is written, of the parts of `value` if that is text."""
    if hint in _LISTS:
        return _LISTS[hint]
    entries = [part.strip() for part in value.split(",")] if isinstance(value, str) else ["..."]
    entry = get_args(hint)[0]
    if is_dataclass(entry):
        first = fields(entry)[0].name
        entries = [f"{{{first}: {part}}}" for part in entries]
    return f"a list, such as [{', '.join(entries)}]"


def _convert_scalar(key: str, value: Any, hint: type, or_list: str = "") -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if hint is int and type(value) is float and value.is_integer():
        if abs(value) >= _EXACT:
            raise ConfigError(
                f"{key}={value!r} is too large to be written with an exponent; write its digits"
            )
        return int(value)
    if type(value) is not hint:
        raise ConfigError(f"{key}={value!r} must be {KINDS[hint]}{or_list}")
    return value


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _choices(hint: Any) -> list[Any]:
    """The members of a union besides None; of any other hint, itself."""
    members = get_args(hint) if _is_union(hint) else (hint,)
    return [member for member in members if member is not types.NoneType]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _field_names(section: type) -> list[str]:
    return [item.name for item in fields(section)]


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
