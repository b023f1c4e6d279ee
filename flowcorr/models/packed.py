"""Base class of families that pack latents into tokens, patches of 2 x 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowcorr.models.base import Conditioning, Guidance, ModelFamily
from flowcorr.models.schedule import Schedule, linear_schedule
from flowcorr.models.sizes import check_size
from flowcorr.records import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image


class PackedFamily(ModelFamily):
    """A family with a transformer that reads patches of 2 x 2 latents as tokens.

    `L` is `(rows, columns, 4 * channels)`: the pipeline's own packed latents `[B, rows * columns, 4 * channels]`
    on their grid, the same numbers in the same order. So a `reshape` leads from one to the other, and latents
    carry their image's proportions with them.

    `predict` takes the scheduler's timesteps, up to 1000, and divides them in float32; the transformer casts the
    quotient to its own dtype, and multiplies it there. Timesteps that an engine rounded before are thereby replayed
    exactly.
    """

    def latent_shape(self, height: int | None, width: int | None) -> tuple[int, ...]:
        factor = 2 * self.pipeline.vae_scale_factor
        height, width = self.image_size(height, width)
        check_size(height, width, factor)
        return (height // factor, width // factor, self.transformer.config.in_channels)

    def image_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Height and width in pixels; the native ones if they are null."""
        native = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return height or native, width or native

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        rows, columns, _ = latent_shape
        return rows * columns

    def schedule(self, num_inference_steps: int, latent_shape: tuple[int, ...]) -> Schedule:
        return linear_schedule(self.pipeline.scheduler, num_inference_steps, self.image_tokens(latent_shape))

    def in_dtype(self, schedule: Schedule, dtype: torch.dtype) -> Schedule:
        timesteps = torch.tensor(schedule.timesteps, dtype=torch.float64) / 1000
        return replace(schedule, timesteps=tuple((timesteps.to(dtype) * 1000).tolist()))

    def call_arguments(self, prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
        arguments = super().call_arguments(prompt, guidance)
        if prompt.images:
            images = self.fitted_references(prompt)
            arguments["image"] = images if len(images) > 1 else images[0]
        return arguments

    def embed(self, prompts: Sequence[Prompt], guidance: Guidance) -> Conditioning:
        return super().embed(prompts, guidance) | self.encode_references(prompts)

    def predict(
        self,
        transformer: Callable[..., Any],
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Mapping[str, Tensor],
        guidance: Guidance,
    ) -> Tensor:
        embeds = conditioning["prompt_embeds"]
        _, rows, columns, _ = latents.shape
        tokens = [latents.flatten(1, 2)]
        if "references" in conditioning:  # behind the image that is drawn
            tokens.append(conditioning["references"].flatten(1, 3))
        velocity = transformer(
            hidden_states=torch.cat([part.to(embeds.dtype) for part in tokens], dim=1),
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds,
            **self.inputs(latents, conditioning, guidance),
            return_dict=False,
        )[0].float()
        return velocity[:, : rows * columns].unflatten(1, (rows, columns))

    def inputs(
        self, latents: Tensor, conditioning: Mapping[str, Tensor], guidance: Guidance
    ) -> dict[str, Any]:
        """The transformer's inputs beside tokens, timesteps and text, such as the places of tokens; here none.

        Tokens are those of the image that is drawn, and behind them those of the reference images.

        Args:
            latents: `[B, *L]`.
            conditioning: `{name: [B, ...]}`: the text as `prompt_embeds`, and reference images as `references`.
            guidance: for transformers that have it as an input.
        """
        return {}

    @torch.no_grad()
    def encode_references(self, prompts: Sequence[Prompt]) -> Conditioning:
        """`references` `[B, R, rows, columns, 4 * channels]`: latents of the reference images; without any, nothing.

        Each image has the size that `fitted_references` gives it.
        """
        if not prompts[0].images:
            return {}
        rows = [
            torch.cat([self._encoded(image) for image in self.fitted_references(prompt)])
            for prompt in prompts
        ]
        return {"references": torch.stack(rows)}

    def fitted_references(self, prompt: Prompt) -> list[Image]:
        """The prompt's reference images at the size that the model reads: here, that of the image that is drawn."""
        size = self.image_size(*self.reference_size)
        return [image.fitted(*size) for image in prompt.images]

    def reference_frame(self) -> tuple[int, int] | None:
        return self.image_size(*self.reference_size)

    def reference_shapes(self, latent_shape: tuple[int, ...], count: int) -> dict[str, tuple[int, ...]]:
        """Shapes of one prompt's tensors of `encode_references`, for `flowcorr plan`.

        Args:
            latent_shape: `L` of the image that is drawn.
            count: reference images of a prompt.
        """
        return {"references": (count, *latent_shape)} if count else {}

    def _encoded(self, image: Image) -> Tensor:
        vae = self.pipeline.vae
        return self.encode_image(self.pipeline.image_processor.preprocess(image).to(vae.device, vae.dtype))

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Latents `[B, *L]` of pixels `[B, 3, H, W]` from -1 to 1; here of a VAE that scales them by one number."""
        vae = self.pipeline.vae
        latents = vae.encode(pixels).latent_dist.mode()
        return self.pack((latents - vae.config.shift_factor) * vae.config.scaling_factor)

    @staticmethod
    def pack(latents: Tensor) -> Tensor:
        """The VAE's `[B, channels, 2 * rows, 2 * columns]` as `[B, rows, columns, 4 * channels]`."""
        patches = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
        return patches.permute(0, 2, 4, 1, 3, 5).flatten(3)

    @staticmethod
    def unpack(latents: Tensor) -> Tensor:
        """`[B, rows, columns, 4 * channels]` as the VAE's `[B, channels, 2 * rows, 2 * columns]`."""
        patches = latents.unflatten(-1, (-1, 2, 2)).permute(0, 3, 1, 4, 2, 5)
        return patches.flatten(4, 5).flatten(2, 3)


def positions(*sizes: int, device: torch.device) -> Tensor:
    """`[prod(sizes), len(sizes)]`: the place of each token on a grid of `sizes`, in the order of its rows."""
    return torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes))
