"""Reads Hydra's YAML files and overrides without Hydra: flat keys, with the references between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flowcorr.config import yaml_text
from flowcorr.errors import ConfigError
from flowcorr.translate.unread import Unread

_REFERENCE = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_MAX_TEXT, _MAX_DEPTH, _MAX_WORK = 10_000, 20, 20_000
_MISSING = "???"


def check_defaults(config: Mapping[str, Any]) -> None:
    """Refuse a YAML that takes values from other files, by its list `defaults`."""
    if config.get("defaults") not in (None, [], ["_self_"]):
        raise ConfigError(
            "it takes values from other files by its list defaults, which are not read; translate the config.yaml that "
            "Hydra saves with a run, under .hydra"
        )


def flat(
    mapping: Mapping[Any, Any], keep: tuple[str, ...] = (), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """All values of nested mappings by their dotted keys; mappings at the keys `keep` stay as they are."""
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in keep:
            yield from flat(value, keep, f"{name}.")
        elif key not in ("_target_", "defaults"):
            yield name, value


def read_override(word: str | Unread) -> tuple[str, Any]:
    """The key and the value of `key=value`, `+key=value` or `++key=value`.

    Raises:
        ConfigError: the word has another form, or its key is not known.
    """
    key, equals, value = str(word).partition("=")
    if key.startswith("--config"):
        raise ConfigError(
            f"the argument {str(word)!r} chooses other defaults, which are not read; translate the config.yaml that "
            "Hydra saves with a run, under .hydra"
        )
    if not equals or not re.fullmatch(r"\+{0,2}\w[\w./-]*", key):
        reason = f" ({word.reason})" if isinstance(word, Unread) else ""
        raise ConfigError(f"the argument {str(word)!r} is not read, only key=value{reason}; leave it out")
    if isinstance(word, Unread):
        return key.lstrip("+"), Unread(value, word.reason)
    try:
        return key.lstrip("+"), yaml_text.parse(value)
    except ConfigError:
        return key.lstrip("+"), value


def read_overrides(words: Iterable[str | Unread], keep: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of overrides by their dotted keys; one of a whole section is an override of each key in it.

    Args:
        words: see `read_override`; the last of a key counts.
        keep: sections that are a value of their own, as in `flat`; given whole, one replaces what was given in it.
    """
    given: dict[str, Any] = {}
    for key, value in map(read_override, words):
        given = overridden(given, dict(flat({key: value}, keep)))
    return given


def overridden(given: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The values with those that `changed` has; what it gives whole replaces all keys of that section."""
    sections = tuple(f"{key}." for key in changed)
    return {key: value for key, value in given.items() if not key.startswith(sections)} | dict(changed)


def resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values with their references `${key}` replaced; one that cannot be is `Unread`, as is `???`.

    Of resolvers only `oc.select` is known. Above all, the environment is not read.
    """
    resolver = _Resolver(given)
    return {key: resolver.value(key, value, 0) for key, value in given.items()}


class _Resolver:
    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.left = _MAX_WORK

    def value(self, key: str, value: Any, depth: int) -> Any:
        """The value at `key` with its references replaced."""
        if isinstance(value, dict):
            return {name: self.value(f"{key}.{name}", part, depth) for name, part in value.items()}
        if isinstance(value, list):
            return [self.value(key, part, depth) for part in value]
        if value == _MISSING:
            return Unread(_MISSING, f"{key}={_MISSING} has no value; give it as an override")
        if not isinstance(value, str) or "${" not in value:
            return value
        text = value
        while match := _REFERENCE.search(text):
            self.left -= 1
            found = self.reference(key, match[1], depth) if self.left > 0 and depth < _MAX_DEPTH else None
            if match[0] == text and found is not None:
                return found
            text = f"{text[: match.start()]}{found}{text[match.end() :]}"
            if found is None or isinstance(found, Unread | dict | list) or len(text) > _MAX_TEXT:
                return Unread(
                    value, f"{key}={value} does not follow from the file; give its value as an override"
                )
        return text.replace("\\${", "${")

    def reference(self, key: str, expression: str, depth: int) -> Any:
        """The value that `${expression}` at `key` stands for; None if it cannot be told."""
        select = expression.startswith("oc.select:")
        name, _, default = expression.removeprefix("oc.select:").partition(",")
        name = name.strip()
        if ":" in name:
            return None
        if name.startswith("."):
            levels = len(name) - len(name.lstrip("."))
            name = ".".join([*key.split(".")[:-levels], name.lstrip(".")])
        if name in self.given:
            return self.value(name, self.given[name], depth + 1)
        return read_override(f"default={default.strip()}")[1] if select and default else None
