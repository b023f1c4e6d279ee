"""Checks that prompts have the tags, targets and reference images that the rewards of a recipe read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from flowcorr.config.task import RewardConfig, RewardTerm
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.records import Prompt
from flowcorr.rewards.combine import REWARDS, states
from flowcorr.rewards.references import check_references
from flowcorr.rewards.targets import is_ambiguous, target_of, why_without_target


def check_prompts(reward: RewardConfig, train: Sequence[Prompt], heldout: Sequence[Prompt]) -> None:
    """Check tags, targets and images of prompts; prompts for training are checked for training rewards only.

    Raises:
        ConfigError: a reward does not fit a prompt; see `check_tags`, `check_targets` and `check_references`.
    """
    # All prompts have equally many images.
    for term in (*reward.terms, *reward.gold):
        if states(term, "needs_reference"):
            check_references(term.name, heldout)
    check_tags(reward.terms, reward.gold, (*train, *heldout))
    check_targets(reward.step_terms, (*train, *heldout))
    check_targets(reward.gold, heldout)


def check_tags(terms: Sequence[RewardTerm], gold: Sequence[RewardTerm], prompts: Sequence[Prompt]) -> None:
    """Check that a term scores each prompt, and that each tag of a term is that of a prompt.

    Raises:
        ConfigError: a prompt would get no reward, or no prompt has a tag that a term names.
    """
    tags = dict.fromkeys(prompt.tag for prompt in prompts)
    known = [tag for tag in tags if tag is not None]
    for key, listed in (("reward.terms", terms), ("reward.gold", gold)):
        for term in listed:
            for name in term.tags:
                if name not in tags:
                    raise ConfigError(unknown_choice(f"{key}[{term.name}].tags", name, known))
    if all(term.tags for term in terms):
        scored = {name for term in terms for name in term.tags}
        for tag in tags:
            if tag not in scored:
                which = "without a tag" if tag is None else f"with the tag {tag!r}"
                raise ConfigError(
                    f"no term of reward.terms scores prompts {which}; name that tag in a term, or add a term without "
                    "tags"
                )


def check_targets(terms: Sequence[RewardTerm], prompts: Sequence[Prompt]) -> None:
    """Check that each prompt has a target if a term of `REWARDS` that scores it needs one.

    Raises:
        ConfigError: a prompt has none; the message names the first one.

    Warns:
        UserWarning: a reward that may read targets gets none for a prompt, since its quotes are ambiguous.
    """
    for term in terms:
        needs_target = getattr(REWARDS.get(term.name), "needs_target", None)
        is_needed = needs_target is not None and needs_target(term.options)
        scored = [prompt for prompt in prompts if not term.tags or prompt.tag in term.tags]
        missing = [prompt for prompt in scored if target_of(prompt) is None]
        if not is_needed:
            may_read = ":" in term.name or states(term, "sends_targets")
            missing = [prompt for prompt in missing if may_read and is_ambiguous(prompt)]
        if not missing:
            continue
        first = missing[0]
        reason, remedy = why_without_target(first)
        message = (
            f"{first.place or 'data'}: the prompt {first.text!r} {reason}, which reward {term.name} "
            f"{'needs' if is_needed else 'may read'} ({len(missing)} of {len(scored)} prompts have none); {remedy}"
        )
        if is_needed:
            raise ConfigError(message)
        warnings.warn(message, UserWarning, stacklevel=2)
