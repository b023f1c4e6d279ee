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
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan",
        "-+.0123456789",
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}",
            re.compile(rf"^(?:{_pattern})$"),
            ["" if character == "\0" else character for character in _first],
        )


def parse(text: str) -> Any:
    """Parse one YAML document; raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=_Loader)


def dump(data: Any) -> str:
    """Write plain data as YAML that `parse` reads back to the same data; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=110)
