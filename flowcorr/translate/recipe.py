"""Writes a translation as the text of a recipe, with a comment on every line."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flowcorr.config.load import without_interpolation
from flowcorr.config.overrides import redact_override
from flowcorr.translate.table import Line, Translation

_WIDTH = 110
_WITHOUT_EFFECT = "not carried over, and without effect on learning, sampling, rewards and evaluations here"
_PLAIN = re.compile(r"[A-Za-z~/][\w./~-]*", re.ASCII)
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "nan", "inf", "~")


def recipe_text(translation: Translation, origin: str, *, all_keys: bool = False) -> str:
    """The recipe as YAML.

    Args:
        translation: the lines of the recipe, and the keys that are not carried over.
        origin: the translated file, for the first line.
        all_keys: list the keys that change nothing too, instead of their number.
    """
    parts = [
        f"# Translated by flowcorr translate from {_one_line(origin)}.",
        "# Each comment names the source of its line. Defaults that differ from flowcorr's are written out.",
        *_section(_tree(translation.lines), 0),
    ]
    for reason, keys in translation.left.items():
        parts += _comment(f"not carried over ({reason}):", keys)
    rest = translation.without_effect
    if all_keys and rest:
        parts += _comment(f"{_WITHOUT_EFFECT}:", rest)
    elif rest:
        counts = Counter(_section_of(key) for key in rest)
        shown = ", ".join(f"{section} {count}" for section, count in counts.items())
        parts += [
            f"# {_WITHOUT_EFFECT}: {len(rest)} keys",
            *(
                f"# {line}"
                for line in textwrap.wrap(f"({shown}; --all lists them)", _WIDTH, break_long_words=False)
            ),
        ]
    parts += ["# differs in any case:", *(f"#   {difference}" for difference in translation.differences)]
    return "\n".join(parts) + "\n"


def _section_of(entry: str) -> str:
    """The section of `a.b.c=value`, at most its first two names."""
    names = entry.partition("=")[0].split(".")[:-1]
    return ".".join(names[:2]) or "top level"


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
    return [f"# {title}", *(f"#   {_one_line(redact_override(entry))[:_WIDTH]}" for entry in entries)]


def _one_line(text: str) -> str:
    """Text as it may stand in a comment of YAML."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
