"""Prompt embeddings, computed once: the text encoders then leave the device."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from flowcorr.models.base import Conditioning, Guidance, ModelFamily
from flowcorr.models.negatives import negative_prompts
from flowcorr.records import Prompt
from flowcorr.texts import folded

logger = logging.getLogger(__name__)
_Key = tuple[str, ...]  # a kind of row, and the texts that it depends on

CHUNK, CHUNK_TOKENS = 64, 4096  # prompts that are encoded at a time at most, and tokens
MAX_BYTES = 8 * 2**30
MULTIPLE = 16  # of tokens: what matrix products and attention on a GPU are fast with


class PromptCache:
    """Conditioning by prompt, kept in main memory; prompts of one key share the row of the first of them.

    A negative prompt is encoded with the first prompts that have it, and stored once for all of them; but an encoder
    that reads reference images reads it again with the images of each prompt. Text with a mask is stored without
    padding, and rows are padded to the longest of `prompts` only, since padding costs time though the mask hides it.

    If the embeddings of all `prompts` fit into `max_bytes`, they are computed at once, in order and in fixed chunks,
    prompts with one negative prompt together, and the text encoders are freed. Otherwise the encoders wait in main
    memory, and each prompt is encoded alone when it is needed; beyond `max_bytes` the least recently used rows are
    dropped, except rows of the current call. Either way a prompt's embedding does not depend on the batch that asks for
    it.
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
        self._guidance = guidance
        self._max_bytes = max_bytes
        self._is_guided = family.needs_negative(guidance)
        self._sees_images = family.vision_tokens > 0 and any(prompt.images for prompt in prompts)
        self._rows: dict[_Key, Conditioning] = {}  # of prompts, and of negative prompts
        self._num_tokens: dict[str, int] = {}  # of each text with a mask, negative or not
        self._first: dict[str, Prompt] = {}  # by content
        self._negatives: dict[str, str] = {}  # by their folded text
        asked = {self._keys(prompt): self._first_spelling(prompt) for prompt in prompts}
        family.cuts.add(self._first.values())
        if self._is_guided:
            family.cuts.add(negative_prompts(prompts, guidance))
        unique = sorted(asked.values(), key=self._negative)
        chunks = range(0, len(unique), chunk_size(family.text_tokens))
        self._add(unique[: chunks.step])
        size = self._size_of({key for keys in asked for key in keys})
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
        for begin in chunks[1:]:
            self._add(unique[begin : begin + chunks.step])
        for text, full in self._num_tokens.items():
            rows = self._rows.values()
            longest = max(len(tensor) for row in rows for name, tensor in row.items() if _text(name) == text)
            self._num_tokens[text] = min(full, -(-longest // MULTIPLE) * MULTIPLE)
        family.free_text_encoders()

    def __call__(self, prompts: Sequence[Prompt]) -> Conditioning:
        """Conditioning `{name: [B, ...]}` of `prompts`, on the model's device."""
        device = next(self._family.transformer.parameters()).device
        keys = [self._keys(prompt) for prompt in prompts]
        missing = {
            own: self._first_spelling(prompt)
            for own, prompt in zip(keys, prompts, strict=True)
            if not self._rows.keys() >= {*own}
        }
        if missing:
            self._family.move_text_encoders(device)
            for prompt in missing.values():
                self._add([prompt])
            self._family.move_text_encoders(torch.device("cpu"))
        asked = [key for own in keys for key in own]
        for key in asked:
            self._rows[key] = self._rows.pop(key)  # to the end: the oldest come first
        if not self._fits:
            self._drop_oldest(keep=len(set(asked)))
        rows = [{name: row for key in own for name, row in self._rows[key].items()} for own in keys]
        return {name: self._stacked(name, [row[name] for row in rows]).to(device) for name in rows[0]}

    def _negative(self, prompt: Prompt) -> str:
        """The negative prompt of a prompt, in the folded spelling; empty without guidance."""
        return folded(self._guidance.of_prompt(prompt).negative_prompt) if self._is_guided else ""

    def _keys(self, prompt: Prompt) -> tuple[_Key, ...]:
        """The rows that make up a prompt's conditioning: its own, and its negative prompt's."""
        if not self._is_guided:
            return (("prompt", prompt.content),)
        if self._sees_images:
            return (("both", prompt.content, self._negative(prompt)),)
        return ("prompt", prompt.content), ("negative", self._negative(prompt))

    def _first_spelling(self, prompt: Prompt) -> Prompt:
        """The prompt as it was spelt first, text and negative prompt each on its own."""
        first = self._first.setdefault(prompt.content, prompt)
        text = self._guidance.of_prompt(prompt).negative_prompt
        return replace(first, negative_prompt=self._negatives.setdefault(self._negative(prompt), text))

    def _size_of(self, keys: Collection[_Key]) -> float:
        """Estimated bytes of rows, each as large as the mean stored row of its kind."""
        sizes: dict[str, list[int]] = {}
        for key, row in self._rows.items():
            sizes.setdefault(key[0], []).append(_nbytes(row))
        return sum(sum(sizes[kind]) / len(sizes[kind]) for kind, *_ in keys)

    def _add(self, prompts: Sequence[Prompt]) -> None:
        """Encode prompts and store their rows; negative prompts are encoded only if one of them is not stored."""
        keys = [self._keys(prompt) for prompt in prompts]
        is_known = all(own[-1] in self._rows for own in keys) and self._is_guided
        encoded: dict[str, Tensor] = self._family.encode(prompts, Guidance() if is_known else self._guidance)
        masked = _with_masks(encoded)
        self._num_tokens |= {_text(name): encoded[name].shape[1] for name in masked}
        for index, own in enumerate(keys):
            row = {name: rows[index] for name, rows in encoded.items()}
            lengths = {name: int(row[mask].nonzero().max()) + 1 for name, mask in masked.items()}
            kept = {name: self._stored(values[: lengths.get(name)]) for name, values in row.items()}
            if len(own) == 1:
                self._rows.setdefault(own[0], kept)
                continue
            for key, is_negative in zip(own, (False, True), strict=True):
                part = {name: kept[name] for name in kept if name.startswith("negative_") == is_negative}
                self._rows.setdefault(key, part)

    def _stored(self, values: Tensor) -> Tensor:
        """A copy in main memory, in the dtype that the transformer computes with."""
        dtype = self._family.dtype if values.is_floating_point() else values.dtype
        return values.to("cpu", dtype, copy=True)

    def _stacked(self, name: str, rows: Sequence[Tensor]) -> Tensor:
        """Stack rows to a batch; rows with a mask are padded with zeros."""
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
