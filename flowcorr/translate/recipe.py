"""Writes a translation as the text of a recipe, with a comment on every line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowcorr.config.load import without_interpolation
from flowcorr.translate.table import Line, Translation

_WIDTH = 110
_PLAIN = re.compile(r"[A-Za-z~/][\w./~-]*", re.ASCII)
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "nan", "inf", "~")


def recipe_text(translation: Translation, origin: str, not_read: Sequence[str] = ()) -> str:
    """The recipe as YAML.

    Args:
        translation: the lines of the recipe, and the keys without an equivalent.
        origin: the translated file, for the first line.
        not_read: what the file does before, and may change it.
    """
    parts = [
        f"# Translated by flowcorr translate from {_one_line(origin)}.",
        "# Each comment names the source of its line. Defaults that differ from flowcorr's are written out.",
        *_section(_tree(translation.lines), 0),
    ]
    if translation.no_line:
        parts += _comment("as here anyway, or without effect beside other keys:", translation.no_line)
    for reason, keys in translation.no_place.items():
        parts += _comment(f"no equivalent here ({reason}):", keys)
    if translation.unknown:
        parts += _comment("unknown to flowcorr translate:", translation.unknown)
    if not_read:
        parts += _comment("not read, and may change what is above:", not_read)
    parts += ["# differs in any case:", *(f"#   {difference}" for difference in translation.differences)]
    return "\n".join(parts) + "\n"


def _tree(lines: Mapping[str, Line]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, line in lines.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = line
    return tree


def _section(tree: Mapping[str, Any], depth: int) -> list[str]:
    lines = []
    for name, entry in tree.items():
        indent = "  " * depth
        if isinstance(entry, Line):
            lines.append(f"{indent}{name}: {_value(entry.value)}  # {_one_line(entry.comment)}")
        else:
            lines += [f"{indent}{name}:", *_section(entry, depth + 1)]
    return lines


def _value(value: Any) -> str:
    """A value as YAML, on one line; text that looks like an interpolation is escaped."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(without_interpolation(value))


def _comment(title: str, entries: Sequence[str]) -> list[str]:
    return [f"# {title}", *(f"#   {_one_line(entry)[:_WIDTH]}" for entry in entries)]


def _one_line(text: str) -> str:
    """Text as it may stand in a comment of YAML."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
