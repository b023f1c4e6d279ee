"""Prompt embeddings, computed once: the text encoders are then released."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from flowcorr.models.base import Conditioning, Guidance, ModelFamily

logger = logging.getLogger(__name__)

CHUNK = 64
MAX_BYTES = 8 * 2**30


class PromptCache:
    """Conditioning by prompt text, kept in main memory.

    If the embeddings of all `texts` fit into `max_bytes` they are computed at once, in their order and in
    fixed chunks, and the text encoders are freed. Otherwise the encoders stay and each prompt is encoded
    when it is needed, alone; beyond `max_bytes` those that were not asked for the longest are dropped, but none of
    the call that asks. Either way a prompt's embedding never depends on the batch that asks for it.
    """

    def __init__(
        self, family: ModelFamily, guidance: Guidance, texts: Sequence[str], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._family = family
        self._guidance = guidance
        self._max_bytes = max_bytes
        self._rows: dict[str, Conditioning] = {}
        unique = list(dict.fromkeys(texts))
        first = unique[:CHUNK]
        self._add(first)
        size = _nbytes(self._rows[first[0]]) * len(unique)
        self._fits = size <= max_bytes
        if not self._fits:
            logger.info(
                "embeddings of %d prompts need %.1f GB: the text encoders stay in memory",
                len(unique),
                size / 2**30,
            )
            self._rows.clear()
            return
        for begin in range(CHUNK, len(unique), CHUNK):
            self._add(unique[begin : begin + CHUNK])
        family.free_text_encoders()

    def __call__(self, texts: Sequence[str]) -> Conditioning:
        """Conditioning `{name: [B, ...]}` of `texts`, on the model's device."""
        for text in texts:
            if text not in self._rows:
                self._add([text])
            else:
                self._rows[text] = self._rows.pop(text)  # to the end: the oldest come first
        if not self._fits:
            self._drop_oldest(keep=len(set(texts)))
        device = next(self._family.transformer.parameters()).device
        rows = [self._rows[text] for text in texts]
        return {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}

    def _add(self, texts: Sequence[str]) -> None:
        encoded: dict[str, Tensor] = self._family.encode(texts, self._guidance)
        for index, text in enumerate(texts):
            self._rows[text] = {name: rows[index].cpu().clone() for name, rows in encoded.items()}

    def _drop_oldest(self, *, keep: int) -> None:
        size = sum(map(_nbytes, self._rows.values()))
        while size > self._max_bytes and len(self._rows) > keep:
            size -= _nbytes(self._rows.pop(next(iter(self._rows))))


def _nbytes(row: Conditioning) -> int:
    return sum(tensor.nbytes for tensor in row.values())
