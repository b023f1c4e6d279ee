"""Other people's checkpoints: whether the hub answers, and whether all of a model arrived.

The hub is asked once, before libraries ask it again and again. Where files are missing, transformers makes up what they
would hold: weights are drawn at random, and a tokenizer knows no words.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def missing_weight(model: Any, loading_info: Mapping[str, Any]) -> str | None:
    """The first weight, by name, that the files of a model of transformers lack; None if they are complete.

    Args:
        model: as it was loaded.
        loading_info: what `from_pretrained` returns beside it.
    """
    head = model.get_output_embeddings()  # it predicts tokens, and images need none
    unused = set() if head is None else {id(weight) for weight in head.parameters()}
    weights = dict(model.named_parameters())
    return min(
        (key for key in loading_info["missing_keys"] if id(weights.get(key)) not in unused), default=None
    )


def knows_words(tokenizer: Any) -> bool:
    """Whether a tokenizer of transformers has a vocabulary besides its special and added tokens."""
    vocabulary = set(tokenizer.get_vocab()) - {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return len(vocabulary) > 1  # T5's has a mark of word boundaries in any case
