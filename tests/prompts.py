"""Prompts by their texts alone."""

from collections.abc import Iterable

from flowcorr.records import Prompt


def prompts_of(texts: Iterable[str]) -> list[Prompt]:
    """A prompt of each text."""
    return [Prompt(text=text) for text in texts]
