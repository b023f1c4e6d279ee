"""Values that do not follow from the text of a file: the output of a command, a variable of the environment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that reading a file does not tell.

    Attributes:
        text: how the file writes it.
        reason: why it is not known, with its line.
    """

    text: str
    reason: str

    def __str__(self) -> str:
        return self.text


def unread_in(value: Any) -> Iterator[Unread]:
    """All unread values in `value`, which may be a list, a tuple or a mapping."""
    if isinstance(value, Unread):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from unread_in(part)
