"""Sizes of each model family's text: tokens of its text encoders, and conditioning of its transformer."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.pipelines import Architecture
from flowcorr.models import FAMILIES, Conditioning, ModelFamily
from flowcorr.models.base import TextShapes
from flowcorr.models.prompt_cache import MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInputs(TextShapes):
    """Sizes of one prompt's text in a run.

    Attributes:
        negative: whether each prompt comes with the encoded negative prompt.
    """

    negative: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all conditioning tensors, including the negative prompt's."""
        negative = {f"negative_{name}": shape for name, shape in self.conditioning.items()}
        return {**self.conditioning, **(negative if self.negative else {})}

    def make(self, samples: int, dtype: torch.dtype) -> Conditioning:
        """Conditioning `[B, ...]` of `samples`, without values."""
        return {
            name: torch.ones(samples, *shape, dtype=_dtype(name, dtype))
            for name, shape in self.shapes.items()
        }

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one prompt's conditioning, without the negative prompt's."""
        shapes = self.conditioning.items()
        return sum(math.prod(shape) * _dtype(name, dtype).itemsize for name, shape in shapes)


def with_longest_prompt(config: Config, family: type[ModelFamily], texts: Collection[str]) -> Config:
    """The config with `model.max_sequence_length` lowered to the longest prompt, for families that pad to that.

    A token is at least one byte, so the length in bytes bounds the number of tokens.
    """
    if family.template_tokens is None:
        return config
    longest = max(len(text.encode()) for text in (*texts, config.sampling.negative_prompt))
    longest += family.template_tokens
    length = min(_text_tokens(config, family), -(-longest // MULTIPLE) * MULTIPLE)
    return replace(config, model=replace(config.model, max_sequence_length=length))


def encoder_inputs(
    architecture: Architecture, family: type[ModelFamily], config: Config, texts: Collection[str]
) -> TextInputs:
    """The text inputs while `texts` are encoded: padded to the longest, or to the family's limit."""
    padded = with_longest_prompt(config, family, texts) if family.encodes_to_longest else config
    return text_inputs(architecture, family, padded)


def text_inputs(architecture: Architecture, family: type[ModelFamily], config: Config) -> TextInputs:
    """The text inputs of a run.

    Raises:
        ConfigError: the family does not state them.
    """
    shapes = family.text_shapes(architecture.configs, _text_tokens(config, family))
    if shapes is None:
        raise ConfigError(
            f"flowcorr plan does not know the text inputs of model.family={config.model.family!r}, only "
            f"those of {', '.join(FAMILIES)}; {family.__name__}.text_shapes can state them"
        )
    return TextInputs(
        tokens=shapes.tokens,
        conditioning=shapes.conditioning,
        negative=family.encodes_negative and getattr(config.sampling, family.guidance_key) > 1,
    )


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.bool if name.endswith("mask") else dtype


def _text_tokens(config: Config, family: type[ModelFamily]) -> int:
    return family.count_text_tokens(config.model.max_sequence_length)
