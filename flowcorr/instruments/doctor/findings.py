"""Findings of the doctor's checks: healthy, a warning, serious, or a note for a check without a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowcorr.health.finding import Finding


def judged(
    value: float,
    limit: float,
    good: str,
    bad: str,
    remedy: str,
    *,
    fails_above: float | None = None,
    **numbers: Any,
) -> Finding:
    """The finding that follows from a number: healthy up to `limit`, serious above `fails_above`, else a warning.

    Args:
        value: the number; NaN is serious.
        limit: the largest value that is healthy.
        good: the sentence for a healthy value.
        bad: the sentence for other values.
        remedy: the advice for other values.
        fails_above: the largest value that only warns; `limit` by default, so that nothing warns.
        **numbers: further evidence, by name.
    """
    if value <= limit:
        return passed(good, value=value, limit=limit, **numbers)
    if fails_above is not None and value <= fails_above:
        return warned(bad, remedy, value=value, limit=limit, **numbers)
    return failed(bad, remedy, value=value, limit=limit if fails_above is None else fails_above, **numbers)


def passed(sentence: str, **numbers: Any) -> Finding:
    """A check that passed."""
    return Finding(level="healthy", cause="", sentence=sentence, numbers=_known(numbers))


def failed(
    sentence: str, remedy: str, *, cause: str = "", confidence: str = "certain", **numbers: Any
) -> Finding:
    """A fault that was recognised, with the numbers by which it was.

    Without a `cause` that is the check; with one, the finding tells its `confidence`: certain or likely.
    """
    if cause:
        numbers = {"confidence": confidence, **numbers}
    return Finding(level="serious", cause=cause, sentence=sentence, numbers=_known(numbers), remedy=remedy)


def warned(sentence: str, remedy: str, **numbers: Any) -> Finding:
    """A finding on a recognised loss of precision, or on a difference of unknown cause."""
    return Finding(level="warning", cause="", sentence=sentence, numbers=_known(numbers), remedy=remedy)


def skipped(sentence: str, remedy: str = "", **numbers: Any) -> Finding:
    """A finding on a check that was not made, or has no verdict; the remedy names the missing input."""
    return Finding(level="note", cause="", sentence=sentence, numbers=_known(numbers), remedy=remedy)


def of_check(name: str, finding: Finding) -> Finding:
    """A finding with the check's name as its cause, unless it names another cause."""
    if finding.cause in ("", name):
        return replace(finding, cause=name)
    return replace(finding, numbers={"check": name, **finding.numbers})


def _known(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in numbers.items() if value is not None}
