"""Random lowercase words, split by hash into a training and a held-out vocabulary.

The embedded model is pretrained on training words only, and so is every run on them: a held-out word was
never seen, by whatever path it is reached.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from flowcorr.errors import ConfigError

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
LENGTHS = (3, 4)
HELDOUT_SHARE = 0.1


def is_heldout(word: str) -> bool:
    """Whether `word` belongs to the held-out vocabulary: a tenth of all strings, by their SHA-256."""
    first_bytes = hashlib.sha256(word.encode()).digest()[:4]
    return int.from_bytes(first_bytes, "big") < HELDOUT_SHARE * 2**32


def train_words(n: int, seed: int = 0) -> list[str]:
    """`n` distinct training words; the same seed gives the same words, and a smaller `n` their beginning."""
    return _distinct(n, seed, heldout=False)


def heldout_words(n: int, seed: int = 0) -> list[str]:
    """`n` distinct held-out words; the same seed gives the same words, and a smaller `n` their beginning."""
    return _distinct(n, seed, heldout=True)


def _distinct(n: int, seed: int, *, heldout: bool) -> list[str]:
    # Half a vocabulary at most: the last few words would take drawing for ever.
    share = HELDOUT_SHARE if heldout else 1 - HELDOUT_SHARE
    limit = int(share * sum(len(ALPHABET) ** length for length in LENGTHS)) // 2
    if not 0 <= n <= limit:
        side = "held-out" if heldout else "training"
        raise ConfigError(f"{n} {side} words were asked for; choose 0 to {limit}")
    words: dict[str, None] = {}
    stream = _stream(seed)
    while len(words) < n:
        word = next(stream)
        if is_heldout(word) == heldout:
            words[word] = None
    return list(words)


def _stream(seed: int) -> Iterator[str]:
    # Only `random()` is promised to keep its sequence across Python versions, so nothing else is drawn.
    rng = random.Random(seed)
    while True:
        length = LENGTHS[int(rng.random() * len(LENGTHS))]
        yield "".join(ALPHABET[int(rng.random() * len(ALPHABET))] for _ in range(length))
