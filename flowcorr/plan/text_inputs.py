"""Sizes of each model family's text: tokens of its text encoders, and conditioning of its transformer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch

from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError
from flowcorr.models import Conditioning, ModelFamily, flux, flux2_klein, qwen_image, sd3, z_image
from flowcorr.models.prompt_cache import MULTIPLE
from flowcorr.plan.fake_backend import DEVICE
from flowcorr.plan.pipelines import Architecture

_QWEN_TEMPLATE = 34  # tokens that QwenImagePipeline prepends to a prompt, and drops after encoding
_KEPT_TEMPLATE = {"qwen_image": 5, "z_image": 8}  # tokens that these families add to each prompt and keep


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInputs:
    """Sizes of one prompt's text.

    Attributes:
        tokens: number of tokens that each text encoder reads, by the component's name.
        conditioning: shape of each conditioning tensor; those whose name ends in `mask` are bool.
        negative: whether each prompt comes with the encoded negative prompt.
    """

    tokens: Mapping[str, int]
    conditioning: Mapping[str, tuple[int, ...]]
    negative: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all conditioning tensors, including the negative prompt's."""
        negative = {f"negative_{name}": shape for name, shape in self.conditioning.items()}
        return {**self.conditioning, **(negative if self.negative else {})}

    def make(self, samples: int, dtype: torch.dtype) -> Conditioning:
        """Conditioning `[B, ...]` of `samples` on the fake device."""
        return {
            name: torch.ones(samples, *shape, dtype=_dtype(name, dtype), device=DEVICE)
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
    if family.name not in _KEPT_TEMPLATE:
        return config
    longest = max(len(text.encode()) for text in (*texts, config.sampling.negative_prompt))
    longest += _KEPT_TEMPLATE[family.name]
    limit = _length(config, qwen_image.DEFAULT_MAX_SEQUENCE_LENGTH)  # the same as z_image's
    length = min(limit, -(-longest // MULTIPLE) * MULTIPLE)
    return replace(config, model=replace(config.model, max_sequence_length=length))


def encoder_inputs(
    architecture: Architecture, family: type[ModelFamily], config: Config, texts: Collection[str]
) -> TextInputs:
    """The text inputs while `texts` are encoded: Qwen-Image pads them to the longest, other families to their limit."""
    padded = with_longest_prompt(config, family, texts) if family.name == "qwen_image" else config
    return text_inputs(architecture, family, padded)


def text_inputs(architecture: Architecture, family: type[ModelFamily], config: Config) -> TextInputs:
    """The text inputs of a run.

    Raises:
        ConfigError: the family is not in the table.
    """
    if family.name not in _TABLE:
        raise ConfigError(
            f"flowcorr plan does not know the text inputs of model.family={config.model.family!r}, only "
            f"those of {', '.join(_TABLE)}"
        )
    return _TABLE[family.name](architecture, config)


def _sd3(architecture: Architecture, config: Config) -> TextInputs:
    transformer = architecture.configs["transformer"]
    clip = architecture.configs["text_encoder"].get("max_position_embeddings", 77)
    long = _length(config, sd3.DEFAULT_MAX_SEQUENCE_LENGTH)
    return TextInputs(
        tokens={"text_encoder": clip, "text_encoder_2": clip, "text_encoder_3": long},
        conditioning={
            "prompt_embeds": (clip + long, transformer["joint_attention_dim"]),
            "pooled_prompt_embeds": (transformer["pooled_projection_dim"],),
        },
        negative=config.sampling.guidance_scale > 1,
    )


def _flux(architecture: Architecture, config: Config) -> TextInputs:
    transformer = architecture.configs["transformer"]
    clip = architecture.configs["text_encoder"].get("max_position_embeddings", 77)
    long = _length(config, flux.DEFAULT_MAX_SEQUENCE_LENGTH)
    return TextInputs(
        tokens={"text_encoder": clip, "text_encoder_2": long},
        conditioning={
            "prompt_embeds": (long, transformer["joint_attention_dim"]),
            "pooled_prompt_embeds": (transformer["pooled_projection_dim"],),
        },
        negative=False,
    )


def _qwen_image(architecture: Architecture, config: Config) -> TextInputs:
    long = _length(config, qwen_image.DEFAULT_MAX_SEQUENCE_LENGTH)
    width = architecture.configs["transformer"]["joint_attention_dim"]
    return TextInputs(
        tokens={"text_encoder": _QWEN_TEMPLATE + long},
        conditioning={"prompt_embeds": (long, width), "prompt_embeds_mask": (long,)},
        negative=config.sampling.true_cfg_scale > 1,
    )


def _flux2_klein(architecture: Architecture, config: Config) -> TextInputs:
    long = _length(config, flux2_klein.DEFAULT_MAX_SEQUENCE_LENGTH)
    return TextInputs(
        tokens={"text_encoder": long},
        conditioning={"prompt_embeds": (long, architecture.configs["transformer"]["joint_attention_dim"])},
        negative=config.sampling.guidance_scale > 1,
    )


def _z_image(architecture: Architecture, config: Config) -> TextInputs:
    long = _length(config, z_image.DEFAULT_MAX_SEQUENCE_LENGTH)
    width = architecture.configs["transformer"]["cap_feat_dim"]
    return TextInputs(
        tokens={"text_encoder": long},
        conditioning={"prompt_embeds": (long, width), "prompt_embeds_mask": (long,)},
        negative=config.sampling.guidance_scale > 1,
    )


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.bool if name.endswith("mask") else dtype


def _length(config: Config, default: int) -> int:
    length = config.model.max_sequence_length
    return default if length is None else length


_TABLE: dict[str, Callable[[Architecture, Config], TextInputs]] = {
    "sd3": _sd3,
    "flux": _flux,
    "flux2_klein": _flux2_klein,
    "qwen_image": _qwen_image,
    "z_image": _z_image,
}
