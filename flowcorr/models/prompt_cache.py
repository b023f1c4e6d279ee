"""Prompt embeddings, computed once: the text encoders then leave the device."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from flowcorr.models.base import Conditioning, Guidance, ModelFamily
from flowcorr.records import Prompt, distinct

logger = logging.getLogger(__name__)

CHUNK, CHUNK_TOKENS = 64, 4096  # prompts that are encoded at a time at most, and tokens
MAX_BYTES = 8 * 2**30
MULTIPLE = 16  # of tokens: what matrix products and attention on a GPU are fast with


class PromptCache:
    """Conditioning by prompt, kept in main memory; prompts of one key have that of the first of them in `prompts`.

    The negative prompt is the same for all prompts, so it is encoded with the first of them only, and stored once; but
    an encoder that sees reference images reads it with those of each prompt. Of
    text with a mask only the tokens that count are stored, and all rows are padded to the longest of `prompts`: the
    mask hides the padding, but it would cost time.

    If the embeddings of all `prompts` fit into `max_bytes` they are computed at once, in their order and in
    fixed chunks, and the text encoders are freed. Otherwise the encoders wait in main memory, and each prompt is
    encoded when it is needed, alone; beyond `max_bytes` those that were not asked for the longest are dropped, but none
    of the call that asks. Either way a prompt's embedding never depends on the batch that asks for it.
    """

    def __init__(
        self,
        family: ModelFamily,
        guidance: Guidance,
        prompts: Sequence[Prompt],
        *,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._family = family
        self._max_bytes = max_bytes
        self._rows: dict[str, Conditioning] = {}
        self._negative: Conditioning = {}
        self._own_negative = family.vision_tokens > 0 and any(prompt.images for prompt in prompts)
        self._guidance = guidance if self._own_negative else Guidance()
        self._num_tokens: dict[str, int] = {}  # of each text with a mask, negative or not
        unique = distinct(prompts)
        self._first = {prompt.key: prompt for prompt in unique}
        family.cuts.add(unique)
        chunk = chunk_size(family.text_tokens)
        self._add(unique[:chunk], guidance)
        size = sum(map(_nbytes, self._rows.values())) / len(self._rows) * len(unique)
        self._fits = size <= max_bytes
        if not self._fits:
            logger.info(
                "embeddings of %d prompts need %.1f GB: the text encoders stay in memory",
                len(unique),
                size / 1e9,
            )
            self._rows.clear()
            family.move_text_encoders(torch.device("cpu"))
            return
        for begin in range(chunk, len(unique), chunk):
            self._add(unique[begin : begin + chunk])
        for text, full in self._num_tokens.items():
            rows = [*self._rows.values(), self._negative]
            longest = max(len(tensor) for row in rows for name, tensor in row.items() if _text(name) == text)
            self._num_tokens[text] = min(full, -(-longest // MULTIPLE) * MULTIPLE)
        family.free_text_encoders()

    def __call__(self, prompts: Sequence[Prompt]) -> Conditioning:
        """Conditioning `{name: [B, ...]}` of `prompts`, on the model's device."""
        device = next(self._family.transformer.parameters()).device
        missing = [
            self._first.setdefault(prompt.key, prompt)
            for prompt in distinct(prompts)
            if prompt.key not in self._rows
        ]
        if missing:
            self._family.move_text_encoders(device)
            for prompt in missing:
                self._add([prompt])
            self._family.move_text_encoders(torch.device("cpu"))
        keys = [prompt.key for prompt in prompts]
        for key in keys:
            self._rows[key] = self._rows.pop(key)  # to the end: the oldest come first
        if not self._fits:
            self._drop_oldest(keep=len(set(keys)))
        rows = [self._rows[key] for key in keys]
        negative = {name: self._stacked(name, [row] * len(rows)) for name, row in self._negative.items()}
        positive = {name: self._stacked(name, [row[name] for row in rows]) for name in rows[0]}
        return {name: values.to(device) for name, values in (positive | negative).items()}

    def _add(self, prompts: Sequence[Prompt], guidance: Guidance | None = None) -> None:
        """Encode prompts; with guidance also the negative prompt."""
        encoded: dict[str, Tensor] = self._family.encode(prompts, guidance or self._guidance)
        shared = {name for name in encoded if name.startswith("negative_") and not self._own_negative}
        masked = _with_masks(encoded)
        self._num_tokens = {_text(name): encoded[name].shape[1] for name in masked}
        for index, prompt in enumerate(prompts):
            row = {name: rows[index] for name, rows in encoded.items()}
            lengths = {name: int(row[mask].nonzero().max()) + 1 for name, mask in masked.items()}
            kept = {name: self._stored(values[: lengths.get(name)]) for name, values in row.items()}
            self._rows[prompt.key] = {name: kept[name] for name in kept if name not in shared}
            self._negative |= {name: kept[name] for name in shared}

    def _stored(self, values: Tensor) -> Tensor:
        """A copy in main memory, in the dtype that the transformer computes with."""
        dtype = self._family.dtype if values.is_floating_point() else values.dtype
        return values.to("cpu", dtype, copy=True)

    def _stacked(self, name: str, rows: Sequence[Tensor]) -> Tensor:
        """Rows as a batch; those with a mask are padded with zeros."""
        if _text(name) not in self._num_tokens:
            return torch.stack(list(rows))
        length = self._num_tokens[_text(name)]
        padded = [functional.pad(row, (0, 0) * (row.dim() - 1) + (0, length - len(row))) for row in rows]
        return torch.stack(padded)

    def _drop_oldest(self, *, keep: int) -> None:
        size = sum(map(_nbytes, self._rows.values()))
        while size > self._max_bytes and len(self._rows) > keep:
            size -= _nbytes(self._rows.pop(next(iter(self._rows))))


def chunk_size(text_tokens: int) -> int:
    """How many prompts with so many tokens each are encoded at a time."""
    return max(1, min(CHUNK, CHUNK_TOKENS // max(text_tokens, 1)))


def _with_masks(names: Iterable[str]) -> dict[str, str]:
    """The tensors that have a mask, masks included, and the name of the mask."""
    masks = {name.removesuffix("_mask"): name for name in names if name.endswith("_mask")}
    return masks | {mask: mask for mask in masks.values()}


def _text(name: str) -> str:
    """The name that a tensor, its mask and the negative prompt's tensors have in common."""
    return name.removeprefix("negative_").removesuffix("_mask")


def _nbytes(row: Conditioning) -> int:
    return sum(tensor.nbytes for tensor in row.values())
