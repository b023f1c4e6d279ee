"""Unit embeddings of images and texts by a CLIP checkpoint, for the rewards that are built on one."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from flowcorr import hub
from flowcorr.devices import named_device
from flowcorr.errors import ConfigError, one_sentence
from flowcorr.rewards.options import ClipDtype
from flowcorr.texts import are_cut

_CONVERT = (
    "Weights are read from safetensors only, since loading a pickle can run code. Convert it once, if you trust it: "
    "python -c \"from transformers import CLIPModel as M; M.from_pretrained('{}').save_pretrained('converted')\""
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clip:
    """A CLIP model with its processor.

    Attributes:
        model: a `transformers.CLIPModel` without gradients.
        processor: its `CLIPProcessor`.
        device: where the model lies.
        dtype: of its weights and arithmetic; embeddings are normalised in float32.
    """

    model: Any
    processor: Any
    device: torch.device
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Length of an embedding."""
        return self.model.config.projection_dim

    @property
    def max_tokens(self) -> int:
        """Tokens of a text that the model reads, the two at its ends included."""
        return self.model.config.text_config.max_position_embeddings

    @property
    def logit_scale(self) -> float:
        """The factor of cosines that the checkpoint was trained with."""
        return self.model.logit_scale.float().exp().item()

    @torch.no_grad()
    def embed_images(self, images: np.ndarray, batch_size: int) -> Tensor:
        """Unit embeddings `[B, width]` float32, on the CPU, of images `[B, H, W, 3]` uint8."""
        parts = []
        for batch in _batches(images, batch_size):
            inputs = self.processor.image_processor(
                images=list(batch), input_data_format="channels_last", return_tensors="pt"
            )
            pixels = inputs["pixel_values"].to(self.device, self.dtype)
            parts.append(_unit(self.model.get_image_features(pixel_values=pixels).pooler_output))
        return torch.cat(parts)

    def are_cut(self, texts: Sequence[str]) -> list[bool]:
        """Whether each text has more tokens than the model reads."""
        return are_cut(texts, self.processor.tokenizer, self.max_tokens)

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str], batch_size: int) -> Tensor:
        """Unit embeddings `[B, width]` float32, on the CPU; each text is computed once, and cut to fit the model."""
        unique = list(dict.fromkeys(texts))
        parts = []
        for batch in _batches(unique, batch_size):
            tokens = self.processor.tokenizer(
                list(batch),
                padding="max_length",  # so that no embedding depends on the other texts
                truncation=True,
                max_length=self.max_tokens,
                return_tensors="pt",
            ).to(self.device)
            features = self.model.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            )
            parts.append(_unit(features.pooler_output))
        return torch.cat(parts)[[unique.index(text) for text in texts]]


# One model a process: it is large, and rewards must stay cheap to copy and to pickle.
@functools.cache
def load_clip(reward: str, path: str, processor: str, device: str, dtype: ClipDtype) -> Clip:
    """Load a CLIP checkpoint for a reward.

    Args:
        reward: the name of the reward, for messages.
        path: a folder or hub name of a `CLIPModel`.
        processor: a folder or hub name of its processor.
        device: a torch device; `auto` takes CUDA if there is any.
        dtype: of the weights and the arithmetic.

    Raises:
        ConfigError: nothing can be loaded from there, or no safetensors, it is no CLIP model, a weight or the
            vocabulary is missing, the processor is of another model, or there is no such device.
    """
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoProcessor, CLIPModel

    where = named_device(f"reward {reward}: device", device)
    path, processor = os.path.expanduser(path), os.path.expanduser(processor)
    try:
        # Pillow resizes alike on every machine, whether torchvision is there or not.
        loaded = AutoProcessor.from_pretrained(
            processor, backend="pil", trust_remote_code=False, local_files_only=hub.only_cached(processor)
        )
        model, loading_info = AutoModel.from_pretrained(
            path,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=hub.only_cached(path),
            output_loading_info=True,
        )
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        message = (
            f"reward {reward}: path={path!r} with processor={processor!r} cannot be loaded: "
            f"{one_sentence(error)}"
        )
        hint = f". {_CONVERT.format(path)}" if "safetensors" in message else ""
        missing = hub.why_not_found(processor) or hub.why_not_found(path)
        raise ConfigError(message + hint + missing) from error
    if not isinstance(model, CLIPModel):
        raise ConfigError(
            f"reward {reward}: path={path!r} holds a {type(model).__name__}; it must be a CLIPModel"
        )
    if (lost := hub.missing_weight(model, loading_info)) is not None:
        raise ConfigError(
            f"reward {reward}: the files of path={path!r} lack the weight {lost}, without which its scores would be "
            "arbitrary; download them again, or give another checkpoint"
        )
    if len(loaded.tokenizer) > model.config.text_config.vocab_size:
        raise ConfigError(
            f"reward {reward}: processor={processor!r} has a vocabulary of {len(loaded.tokenizer)}, and path={path!r} "
            f"reads one of {model.config.text_config.vocab_size}; give the processor of this checkpoint"
        )
    if not hub.knows_words(loaded.tokenizer):
        raise ConfigError(
            f"reward {reward}: the tokenizer of processor={processor!r} knows no words, so that all prompts would be "
            "one; its vocabulary, such as tokenizer.json, is missing: download it again"
        )
    model.eval().requires_grad_(False).to(where)
    # The model's own device: in a thread, `cuda` alone may name another GPU.
    clip = Clip(model=model, processor=loaded, device=model.device, dtype=DTYPES[dtype])
    try:
        clip.embed_images(np.zeros((1, 64, 64, 3), np.uint8), 1)
    except (ValueError, RuntimeError) as error:  # or else every sample would fail
        raise ConfigError(
            f"reward {reward}: path={path!r} cannot read an image that processor={processor!r} prepared "
            f"({one_sentence(error)}); give the processor of this checkpoint"
        ) from error
    return clip


def _batches(items: Any, batch_size: int) -> Iterator[Any]:
    for begin in range(0, len(items), batch_size):
        yield items[begin : begin + batch_size]


def _unit(features: Tensor) -> Tensor:
    return normalize(features.float(), dim=-1).cpu()
