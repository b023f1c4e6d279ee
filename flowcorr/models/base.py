"""What a model family has to supply: its inputs, guidance, latents and sigmas, and no algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Conditioning = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """Guidance of one run, as `sampling` states it."""

    guidance_scale: float = 1.0
    true_cfg_scale: float = 1.0
    negative_prompt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The sigma table of one run.

    Attributes:
        sigmas: `num_inference_steps + 1` noise levels, from the pipeline's own scheduler, ending in 0.
        timesteps: `num_inference_steps` values as they are fed to the transformer.
    """

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]


class ModelFamily(ABC):
    """A pipeline of one model family, with the few operations that sampling and training share.

    Attributes:
        pipeline: the diffusers pipeline; `transformer` is what is trained, the rest is frozen.
        dtype: dtype of the frozen weights.
    """

    name: ClassVar[str]
    pipeline_class: ClassVar[str]
    lora_targets: ClassVar[tuple[str, ...]]

    def __init__(self, pipeline: Any, *, dtype: torch.dtype, max_sequence_length: int | None = None) -> None:
        self.pipeline = pipeline
        self.dtype = dtype
        self.max_sequence_length = max_sequence_length

    @property
    def transformer(self) -> nn.Module:
        return self.pipeline.transformer

    @abstractmethod
    def latent_shape(self, height: int | None, width: int | None) -> tuple[int, ...]:
        """`L`, the latent shape of one image of `height` x `width` pixels (null: the native size).

        Raises:
            ConfigError: the size is no multiple of what the model works on.
        """

    @abstractmethod
    def schedule(self, num_inference_steps: int, latent_shape: tuple[int, ...]) -> Schedule:
        """The sigma table, as the pipeline's own scheduler makes it."""

    @abstractmethod
    def encode(self, prompts: Sequence[str], guidance: Guidance) -> Conditioning:
        """Text conditioning `{name: [B, ...]}` of the prompts, with the negative prompt's where guidance is on."""

    @abstractmethod
    def free_text_encoders(self) -> None:
        """Release the text encoders' memory; `encode` cannot be called afterwards."""

    @abstractmethod
    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Mapping[str, Tensor],
        guidance: Guidance,
    ) -> Tensor:
        """Velocity `[B, *L]` float32 at `latents` `[B, *L]` and `timesteps` `[B]`, guidance in one batched forward."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Images `[B, H, W, 3]` uint8 of final latents `[B, *L]`."""

    @abstractmethod
    def save_lora(
        self, directory: str, lora_state: Mapping[str, Tensor], metadata: Mapping[str, Any]
    ) -> None:
        """Write an adapter that the pipeline's `load_lora_weights(directory)` reads."""
