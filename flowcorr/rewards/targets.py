"""The words that an image should show: the target of its prompt."""

from __future__ import annotations

from flowcorr.errors import BatchError, ConfigError
from flowcorr.records import Prompt
from flowcorr.texts import letters, quoted

ADD_TARGET = 'put the words into double quotes in a text file, or give a "target" in a JSONL file'
NAME_TARGET = (
    'give the words as "target" of each line of a JSONL file (data.target_field may name another field), or leave one '
    "pair of double quotes in the prompt"
)


def target_of(prompt: Prompt) -> str | None:
    """The prompt's target, None if nothing of it can be seen."""
    return prompt.target if prompt.target and letters(prompt.target) else None


def is_ambiguous(prompt: Prompt) -> bool:
    """Whether a prompt without a target has quotes that can be read in more than one way."""
    return why_without_target(prompt)[1] == NAME_TARGET


def why_without_target(prompt: Prompt) -> tuple[str, str]:
    """Why a prompt without a target has none, and the remedy; the reason continues "the prompt ..."."""
    if prompt.target is None:
        try:
            quoted(prompt.text)
        except ConfigError as error:
            return f"has no clear target ({error})", NAME_TARGET
    return "has no target", ADD_TARGET


def targets_of(prompts: list[Prompt], reward: str) -> list[str]:
    """The text that each image should show.

    Raises:
        BatchError: a prompt has no target.
    """
    targets = []
    for index, prompt in enumerate(prompts):
        target = target_of(prompt)
        if target is None:
            reason, remedy = why_without_target(prompt)
            raise BatchError(f"reward {reward}: sample {index} (prompt {prompt.text!r}) {reason}; {remedy}")
        targets.append(target)
    return targets
