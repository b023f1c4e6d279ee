"""The model hub: whether it answers, asked once before libraries ask it again and again."""

from __future__ import annotations

import functools
from pathlib import Path

TIMEOUT = 5.0
"""Seconds that the hub has for an answer."""


def only_cached(name: str) -> bool:
    """Whether a model is looked for in the local cache alone: it is no folder, and the hub gives no answer."""
    return not Path(name).is_dir() and unreachable() is not None


def why_not_found(name: str) -> str:
    """The addition to the message about a model that could not be loaded; empty if the hub is not the reason."""
    if not only_cached(name):
        return ""
    return (
        f". {unreachable()}, and the local cache does not hold {name}: give the path of a folder, or run "
        f"`hf download {name}` where there is a network"
    )


@functools.cache
def unreachable() -> str | None:
    """Why the hub gives no answer, in words; None if it does."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # of the HTTP library at hand, which differs by version
        return f"{constants.ENDPOINT} gives no answer ({' '.join(str(error).split())})"
    return None
