"""Reward functions of other trainers, by the words in their paths and names."""

from __future__ import annotations

import re
from typing import Any

from flowcorr.errors import ConfigError

REWARDS = {
    "ocr": "ocr",
    "jpeg_compressibility": "jpeg_compressibility",
    "pickscore": "pickscore",
    "aesthetic": "aesthetic",
}
"""Words in the path or name of a reward function, and the corresponding reward of flowcorr."""


def reward_terms(names: dict[str, float]) -> list[dict[str, Any]]:
    """Reward terms from names or paths and their weights; an unknown reward becomes a function that the user writes."""
    terms = []
    for name, weight in names.items():
        word = next((word for word in REWARDS if word in name.lower()), None)
        short = re.sub(r"\W", "_", name.rpartition("/")[2].removesuffix(".py").rpartition(":")[2])
        term = {"name": word or f"my_rewards:{short}"}
        terms.append(term | ({} if weight == 1 else {"weight": float(weight)}))
    return terms


def named_function(entry: tuple[str, Any]) -> tuple[str, float]:
    """Path with name, and weight, of one of several reward functions."""
    name, function = entry
    key = f"reward.reward_functions.{name}"
    if not isinstance(function, dict):
        raise ConfigError(f"{key}={function!r} must be a section of keys")
    weight = function.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"{key}.weight={weight!r} must be a number")
    return f"{function.get('path', '')}:{name}", weight
