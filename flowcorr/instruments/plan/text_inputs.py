"""Sizes of each model family's text: tokens of its text encoders, and conditioning of its transformer."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace

import torch

from flowcorr.config.families import FAMILIES
from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.architecture import Architecture
from flowcorr.models import Conditioning, Guidance, ModelFamily
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


def with_longest_prompt(
    architecture: Architecture, family: type[ModelFamily], config: Config, texts: Collection[str]
) -> Config:
    """The config with `model.max_sequence_length` lowered to the longest of `texts`, if conditioning is cut to that.

    `texts` are the prompts and the negative prompts.

    A token is at least one byte, so the length in bytes bounds the number of tokens.
    """
    inputs = text_inputs(architecture, family, config)
    if not inputs.is_cut_to_longest:
        return config
    longest = max(len(text.encode()) for text in texts)
    length = -(-(longest + inputs.template_tokens) // MULTIPLE) * MULTIPLE
    length = min(family.count_text_tokens(config.model.max_sequence_length), length)
    return replace(config, model=replace(config.model, max_sequence_length=length))


def encoder_inputs(
    architecture: Architecture, family: type[ModelFamily], config: Config, texts: Collection[str]
) -> TextInputs:
    """Shapes of the text inputs during encoding of `texts`: padded to the longest, or to the family's limit."""
    inputs = text_inputs(architecture, family, config)
    if not inputs.encodes_to_longest:
        return inputs
    return text_inputs(architecture, family, with_longest_prompt(architecture, family, config, texts))


def text_inputs(architecture: Architecture, family: type[ModelFamily], config: Config) -> TextInputs:
    """The text inputs of a run.

    Raises:
        ConfigError: the family does not state them.
    """
    seen = architecture.num_references * family.vision_tokens
    length = family.count_text_tokens(config.model.max_sequence_length) + seen
    shapes = family.text_shapes(architecture.configs, length)
    if shapes is None:
        raise ConfigError(
            f"flowcorr plan does not know the text inputs of model.family={config.model.family!r}, only "
            f"those of {', '.join(FAMILIES)}; {family.__name__}.text_shapes can state them"
        )
    stated = {field.name: getattr(shapes, field.name) for field in fields(shapes)}
    return TextInputs(**stated, negative=family.needs_negative(Guidance.of(config.sampling)))


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.bool if name.endswith("mask") else dtype
