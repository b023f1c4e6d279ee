"""The LAION improved aesthetic predictor: a rating of an image by people, 1 to 10, without its prompt.

Source: C. Schuhmann, https://github.com/christophschuhmann/improved-aesthetic-predictor; as a reward: DDPO,
arXiv:2305.13301, section 5.1.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flowcorr.errors import ConfigError
from flowcorr.records import Prompt
from flowcorr.rewards.base import RewardOutput
from flowcorr.rewards.options import ClipDtype, check_clip_options

if TYPE_CHECKING:
    from torch import Tensor

    from flowcorr.rewards.clip import Clip

_WEIGHT = re.compile(r"layers\.(\d+)\.weight")
_CONVERT = (
    "from safetensors.torch import save_file; "
    "save_file(torch.load('sac+logos+ava1-l14-linearMSE.pth', weights_only=True), 'aesthetic.safetensors')"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aesthetic:
    """A small head on the unit image embedding of CLIP ViT-L/14; the prompts do not matter.

    The head is published as a pickle, `sac+logos+ava1-l14-linearMSE.pth`. Convert it once; this runs no code of it:

        import torch
        from safetensors.torch import save_file
        save_file(torch.load("sac+logos+ava1-l14-linearMSE.pth", weights_only=True), "aesthetic.safetensors")

    Attributes:
        head: a safetensors file with `layers.<i>.weight` and `layers.<i>.bias` of its linear layers.
        path: a folder or hub name of the CLIP model and its processor.
        device: a torch device; `auto` takes CUDA if there is any.
        dtype: of the CLIP model; the head computes in float32.
        batch_size: images a forward pass.

    Raises:
        ConfigError: at construction, for options that cannot work and files that cannot be loaded.
    """

    head: str
    path: str = "openai/clip-vit-large-patch14"
    device: str = "auto"
    dtype: ClipDtype = "float32"
    batch_size: int = 16

    name = "aesthetic"
    extras = ()
    computes_on_gpu = True

    def __post_init__(self) -> None:
        texts = {"head": self.head, "path": self.path, "device": self.device}
        check_clip_options(self.name, self.dtype, self.batch_size, **texts)
        layers, width = load_head(self.head), self._clip().width
        takes = layers[0][0].shape[1]
        if takes != width:
            raise ConfigError(
                f"reward aesthetic: head={self.head!r} takes embeddings of length {takes}, and path={self.path!r} "
                f"makes them of length {width}; the published head belongs to openai/clip-vit-large-patch14"
            )

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        """Score images `[B, H, W, 3]` uint8."""
        values = self._clip().embed_images(images, self.batch_size)
        for weight, bias in load_head(self.head):
            values = values @ weight.T + bias
        return RewardOutput(scores=values.squeeze(-1).double().numpy())

    def _clip(self) -> Clip:
        from flowcorr.rewards.clip import load_clip

        return load_clip(self.name, self.path, self.path, self.device, self.dtype)


@functools.cache
def load_head(path: str) -> tuple[tuple[Tensor, Tensor], ...]:
    """Weights and biases of the head's linear layers, in order; nothing but dropout lies between them.

    Raises:
        ConfigError: no such file, no safetensors, or not the layers of such a head.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if Path(path).suffix != ".safetensors":
        raise ConfigError(
            f"reward aesthetic: head={path!r} is not a .safetensors file, and loading a pickle can run code; "
            f"convert it once: {_CONVERT}"
        )
    try:
        tensors = load_file(os.path.expanduser(path))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"reward aesthetic: head={path!r} cannot be loaded: {error}") from error
    places = sorted(int(match[1]) for match in map(_WEIGHT.fullmatch, tensors) if match)
    if not places or not _is_chain(tensors, places):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in sorted(tensors.items())[:8])
        raise ConfigError(
            f"reward aesthetic: head={path!r} must hold layers.<i>.weight and layers.<i>.bias of linear layers "
            f"that end in one number; it holds {shapes}"
        )
    return tuple(
        (tensors[f"layers.{place}.weight"].float(), tensors[f"layers.{place}.bias"].float())
        for place in places
    )


def _is_chain(tensors: Mapping[str, Tensor], places: list[int]) -> bool:
    """Whether the widths of successive layers fit, and the last layer gives one number."""
    weights = [tensors[f"layers.{place}.weight"] for place in places]
    biases = [tensors.get(f"layers.{place}.bias") for place in places]
    return (
        all(weight.dim() == 2 for weight in weights)
        and all(
            bias is not None and bias.shape == weight.shape[:1]
            for weight, bias in zip(weights, biases, strict=True)
        )
        and all(after.shape[1] == before.shape[0] for before, after in pairwise(weights))
        and weights[-1].shape[0] == 1
    )
