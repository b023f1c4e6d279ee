"""Model families by the names of their checkpoints, as far as a name tells them."""

from __future__ import annotations

import re

from flowcorr.models import FAMILIES, ModelFamily

_OTHERS = r"edit|kontext|layered|omni|fill|redux|depth|canny|control|inpaint|video|i2v|tts"


def family_of(path: str) -> type[ModelFamily] | None:
    """The family that a hub name or path tells; None if it tells none, or a model of another kind."""
    for name in reversed(path.lower().split("/")):
        if re.search(_OTHERS, name):
            return None
        for family in FAMILIES.values():
            if family.checkpoint_pattern is not None and re.search(family.checkpoint_pattern, name):
                return family
    return None


def not_known(key: str, path: str) -> str:
    """Message for a model whose name tells no family."""
    return (
        f"{key}={path} names no model of the families that flowcorr knows: {', '.join(FAMILIES)}; if it is one under "
        "another name, give the name of its base model as an override, and set model.path in the recipe"
    )
