"""YAML as recipes mean it: the scalars of YAML 1.2, duplicate keys and tags refused, size and depth bounded.

YAML 1.1, the dialect of PyYAML and OmegaConf, reads `0.5_2` as 0.52, `1:30` as 90, `off` as false and `1e-4` as a
string. Here `0.5_2` stays text (a band), `off` stays text, and `1e-4` is a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from flowcorr.errors import ConfigError

_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)
MAX_VALUES, MAX_LEVELS = 20_000, 50
"""More than any configuration needs."""
_MAX_DIGITS = 19
_TOO_MUCH = f"with its aliases it holds more than {MAX_VALUES} values, or {MAX_LEVELS} levels"


class _Bounded(yaml.SafeLoader):
    def fetch_flow_collection_start(self, kind: type[yaml.Token]) -> None:
        if self.flow_level >= MAX_LEVELS:  # PyYAML's time grows with the square of open brackets
            raise _refused(_TOO_MUCH, self)
        super().fetch_flow_collection_start(kind)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "tag", None) not in (None, "!"):
            raise _refused(f"the tag {event.tag} is not read; leave it out", event)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:  # before 6.0.4, PyYAML copies a pair each time that `<<` names it
            raise _refused(f"with its merges it holds more than {MAX_VALUES} values", node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name is not None and name in seen:
                raise _refused(f"the key {self.construct_object(key)!r} is given twice", key)
            seen.add(name)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MAX_DIGITS + 1:
            raise _refused(f"the number {node.value[:20]}... has more than {_MAX_DIGITS} digits", node)
        return super().construct_yaml_int(node)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        value = super().construct_yaml_float(node)
        digits = re.split("[eE]", node.value)[0]
        if (math.isinf(value) and "inf" not in node.value.lower()) or (
            value == 0 and re.search("[1-9]", digits)
        ):
            raise _refused(f"the number {node.value[:20]} is beyond float64", node)
        return value

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        # JSON escapes the two halves of a letter beyond 16 bits, such as an emoji, and PyYAML does not join them.
        halves = super().construct_yaml_str(node).encode("utf-16", "surrogatepass")
        return halves.decode("utf-16", "surrogatepass")


def _refused(problem: str, at: Any) -> ConstructorError:
    mark = at.get_mark() if isinstance(at, yaml.SafeLoader) else at.start_mark
    return ConstructorError(None, None, problem, mark)


def _values(data: Any, level: int = 0) -> Iterator[int]:
    """The nesting level of every value, counted anew at each use of an alias, which may multiply values."""
    yield level
    parts = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    for part in parts:
        yield from _values(part, level + 1)


def leaves(data: Any) -> Iterator[Any]:
    """All values in plain data that are neither mappings nor lists."""
    if isinstance(data, dict | list | tuple):
        for part in data.values() if isinstance(data, dict) else data:
            yield from leaves(part)
    else:
        yield data


class _Loader(_Bounded):
    """The scalars of YAML 1.2."""


class _OlderLoader(_Bounded):
    """The scalars of YAML 1.1, but `1e-4` is a number, and a date is text, as OmegaConf reads them."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.SequenceNode:
    """Lists of scalars on one line."""
    nested = any(isinstance(item, dict | list) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=not nested)


_Dumper.add_representer(list, _represent_list)
_Bounded.add_constructor("tag:yaml.org,2002:int", _Bounded.construct_yaml_int)
_Bounded.add_constructor("tag:yaml.org,2002:float", _Bounded.construct_yaml_float)
_Bounded.add_constructor("tag:yaml.org,2002:str", _Bounded.construct_yaml_str)

_OlderLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_OlderLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), [*"-+0123456789"]
)
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}  # without it, the scalars of YAML 1.1 would be inherited
    for _name, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}",
            re.compile(rf"^(?:{_pattern})$"),
            ["", *_first],
        )


def parse(text: str) -> Any:
    """Parse one YAML document.

    Raises:
        ConfigError: it is no YAML, or more of it than a configuration can need; the message names line and column.
    """
    return _load(text, _Loader)


def parse_older(text: str) -> Any:
    """Parse one YAML document as OmegaConf does, and other trainers; see `parse`."""
    return _load(text, _OlderLoader)


def _load(text: str, loader: type[_Bounded]) -> Any:
    try:
        data = yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        problem = " ".join(f"{error.problem}".split())
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"not valid YAML: {problem}{place}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"not valid YAML: {_TOO_MUCH}") from None
    if any(number >= MAX_VALUES or level >= MAX_LEVELS for number, level in enumerate(_values(data))):
        raise ConfigError(f"not valid YAML: {_TOO_MUCH}")
    return data


def scan(text: str) -> Iterator[yaml.Token]:
    """The tokens of a document; raises `yaml.YAMLError` if it is no YAML."""
    return yaml.scan(text, Loader=_Loader)


def has_comment(text: str) -> bool:
    """Whether a comment ends a document, which `parse` reads."""
    tokens = [token for token in scan(text) if token.start_mark.index < token.end_mark.index]
    end = max((token.end_mark.index for token in tokens), default=0)
    return text[end:].lstrip().startswith("#")


def dump(data: Any) -> str:
    """Write plain data as YAML that `parse` reads back to the same data; keys keep their order."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=110
    )
