"""YAML as recipes mean it: the scalars of YAML 1.2, duplicate keys refused.

YAML 1.1, the dialect of PyYAML and OmegaConf, reads `0.5_2` as 0.52, `1:30` as 90, `off` as false and `1e-4` as a
string. Here `0.5_2` stays text (a band), `off` stays text, and `1e-4` is a number.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan",
        "-+.0123456789",
    ),
)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return mapping


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.SequenceNode:
    """Lists of scalars on one line."""
    nested = any(isinstance(item, dict | list) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=not nested)


_Dumper.add_representer(list, _represent_list)

for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}  # without it, the scalars of YAML 1.1 would be inherited
    for _name, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}",
            re.compile(rf"^(?:{_pattern})$"),
            ["", *_first],
        )


def parse(text: str) -> Any:
    """Parse one YAML document; raises `yaml.YAMLError`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("its lists or sections are nested too deeply") from None
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:  # PyYAML lets these out, as of `!!int one` or a number of 5,000 digits
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error


def dump(data: Any) -> str:
    """Write plain data as YAML that `parse` reads back to the same data; keys keep their order."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=110
    )
