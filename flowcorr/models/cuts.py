"""Counts prompts that a text encoder cuts and references that are cropped, and describes the loss.

A `family` is a `ModelFamily`, whose module imports this one.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowcorr.records import Prompt
from flowcorr.texts import are_cut, folded

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A text encoder with its tokenizer.

    Attributes:
        name: the encoder's name in the pipeline, and its class.
        tokenizer: of transformers.
        limit: tokens that the encoder reads, those of a template and of the tokenizer's own included.
    """

    name: str
    tokenizer: Any
    limit: int

    def is_cut(self, texts: Sequence[str]) -> list[bool]:
        """Whether each text has more tokens than the encoder reads."""
        return are_cut(texts, self.tokenizer, self.limit)

    def read(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The tokens of each text that the encoder reads."""
        tokens = self.tokenizer(list(texts), truncation=True, max_length=self.limit, verbose=False).input_ids
        return [tuple(row) for row in tokens]


_MOST_CUT = 0.05  # of a reference's area: below it is the rounding of sizes


class CutReport:
    """Logs a line about prompts that are cut, and one about reference images, once for each of them."""

    def __init__(self, family: Any) -> None:
        self._family = family
        self._known: set[str] = set()

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Log how many of the prompts that were not added before are cut, and of their references, if any are."""
        prompts = list(prompts)
        unseen = [prompt for prompt in prompts if prompt.images and prompt.content not in self._known]
        self._known |= {prompt.content for prompt in unseen}
        if unseen and (message := describe_cropped(self._family, unseen)) is not None:
            logger.warning(message)
        new = list({prompt.text: prompt for prompt in prompts if prompt.text not in self._known}.values())
        self._known |= {prompt.text for prompt in new}
        message = describe_cuts(self._family, new) if new else None
        if message is not None:
            logger.warning(message)


def readers(family: Any) -> list[Reader]:
    """The text encoders of a family's pipeline, and how much of a prompt each of them reads."""
    parts = family.pipeline.components
    configs = {
        name: part.config.to_dict() if hasattr(part.config, "to_dict") else part.config
        for name, part in parts.items()
        if hasattr(part, "config")
    }
    listed = []
    for name, encoder in family.text_encoders.items():
        tokenizer = parts.get(name.replace("text_encoder", "tokenizer"))
        if tokenizer is None:
            continue
        shapes = family.text_shapes(configs, family.text_tokens)
        limit = shapes.tokens[name] if shapes else min(family.text_tokens, tokenizer.model_max_length)
        listed.append(Reader(name=f"{name} ({type(encoder).__name__})", tokenizer=tokenizer, limit=limit))
    return listed


def describe_cropped(family: Any, prompts: Sequence[Prompt]) -> str | None:
    """A sentence on reference images that lose more than rounding takes; None if the model sees all of each."""
    frame = family.reference_frame()
    if frame is None:
        return None
    owners = {image: prompt for prompt in reversed(prompts) for image in prompt.images}
    cut = {image: share for image in owners if (share := image.share_cut(*frame)) > _MOST_CUT}
    if not cut:
        return None
    worst = max(cut, key=lambda image: cut[image])
    width, height = worst.size
    return (
        f"reference images are cut to the proportions of the image that is drawn, {frame[1]} x {frame[0]}: "
        f"{len(cut)} of {len(owners)} lose up to {100 * cut[worst]:.0f} % of their area at their edges "
        f"({owners[worst].place or worst.path} with {width} x {height} loses the most); draw in their proportions with "
        "sampling.height and sampling.width, or pad the images"
    )


def describe_cuts(family: Any, prompts: Sequence[Prompt]) -> str | None:
    """A sentence on prompts that an encoder does not read to their end; None if each encoder reads all of them."""
    texts = [family.tokenized_text(prompt.text) for prompt in prompts]
    upto_target = [_upto_target(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    encoders = readers(family)
    losses: dict[str, list[str]] = {}  # encoders by what they cut: those of one kind cut alike
    whole, first, is_long_cut = [], None, False
    for encoder in encoders:
        cut = encoder.is_cut(texts)
        if not any(cut):
            whole.append(encoder.name)
            continue
        loss = f"{sum(cut)} of {len(prompts)} beyond {encoder.limit} tokens"
        if lost := sum(encoder.is_cut([text for text in upto_target if text is not None])):
            loss += f", {lost} of which lose words of their target"
        losses.setdefault(loss, []).append(encoder.name)
        first = first or prompts[cut.index(True)]
        is_long_cut |= encoder.limit >= family.text_tokens
    if first is None:
        return None
    parts = [f"{' and '.join(names)}: {loss}" for loss, names in losses.items()]
    if equal := _equal_prompts(encoders, prompts, texts):
        parts.append(f"{equal} become equal to another prompt")
    if whole:
        remedy = f"the loss is mild, since {' and '.join(whole)} reads all of every prompt"
    elif is_long_cut:
        remedy = f"shorten them, or raise model.max_sequence_length={family.text_tokens}"
    else:
        remedy = "shorten them"
    place = first.place or repr(first.text[:60])
    return f"prompts are cut ({place} is the first) by {'; '.join(parts)}; {remedy}"


def _upto_target(prompt: Prompt, text: str) -> str | None:
    """The text up to the end of the prompt's target; None if the prompt does not contain its target."""
    word, words = re.escape(prompt.target or ""), prompt.text.strip()  # some chat templates trim a prompt
    target = re.search(rf"(?<!\w){word}(?!\w)", words) or re.search(word, words)
    if not prompt.target or target is None or words not in text:
        return None
    return text[: text.index(words) + target.end()]


def _equal_prompts(encoders: Sequence[Reader], prompts: Sequence[Prompt], texts: Sequence[str]) -> int:
    """Number of prompts that all encoders read like another prompt, though their texts differ."""
    tokens = zip(*(encoder.read(texts) for encoder in encoders), strict=True)
    counts = Counter({folded(prompt.text): row for prompt, row in zip(prompts, tokens, strict=True)}.values())
    return sum(count for count in counts.values() if count > 1)
