"""Reward functions of other trainers, in flowcorr's units."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowcorr.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A reward that flowcorr has too.

    Attributes:
        name: its name here.
        factor: what the score here is multiplied by to be theirs.
        options: the options that make it the same.
        note: what differs, or has to be set.
    """

    name: str
    factor: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


JUDGE_URL = "http://localhost:8000/v1"
JPEG = Known(name="jpeg_compressibility", factor=1 / 500, note="kB / 500 there, kB here")
PICKSCORE = Known(name="pickscore")
OCR = Known(
    name="ocr",
    options={"exact_weight": 0.0, "detect": True},
    note="ocr divides the edit distance by the longer text, and counts surplus text in full",
)
AESTHETIC = Known(
    name="aesthetic",
    options={"head": "sac+logos+ava1-l14-linearMSE.safetensors"},
    note="convert the head of aesthetic once, see flowcorr/rewards/aesthetic.py",
)
JUDGED_OCR = Known(
    name="vlm_judge",
    options={"base_url": JUDGE_URL, "mode": "transcribe"},
    note=f"serve the model of vlm_judge at {JUDGE_URL}; it is asked for JSON, at temperature 0, and its edit distance "
    "is divided by the longer text",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward of a source.

    Attributes:
        name: what a function of the user's own is called.
        known: the reward that flowcorr has, or None.
        weight: its weight there.
        options: what the source gives it.
        without: names of what the source gives it and flowcorr's own reward does not take.
    """

    name: str
    known: Known | None
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[str] = ()


def terms(given: Sequence[Reward], *, normalize: str = "none") -> list[dict[str, Any]]:
    """The value of `reward.terms`; a reward that flowcorr lacks becomes a function that the user writes."""
    made = []
    for reward in given:
        own = re.sub(r"\W", "_", reward.name)
        known = reward.known or Known(name=f"my_rewards:{own}")
        weight, options = reward.weight * known.factor, {**known.options, **reward.options}
        term: dict[str, Any] = {"name": known.name}
        term |= {"weight": weight} if weight != 1 else {}
        term |= {"options": options} if options else {}
        made.append(term | ({"normalize": normalize} if normalize != "none" else {}))
    return made


def note(given: Sequence[Reward]) -> str:
    """A note to the user about the terms."""
    notes = [reward.known.note for reward in given if reward.known is not None]
    if any(reward.known is None for reward in given):
        notes.append("write my_rewards:NAME yourself, see examples/custom_reward.py")
    left = [name for reward in given for name in reward.without]
    if left:
        notes.append(f"without {', '.join(dict.fromkeys(left))}")
    return "; ".join(dict.fromkeys(text for text in notes if text))


def number(key: str, value: Any) -> float:
    """A weight as a float; raises `ConfigError` if it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}={value!r} must be a number")
    return float(value)
