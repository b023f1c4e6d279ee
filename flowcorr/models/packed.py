"""Families whose latents are packed into tokens, each a patch of 2 x 2."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flowcorr.models.base import ModelFamily, Schedule, linear_schedule
from flowcorr.models.sizes import check_size


class PackedFamily(ModelFamily):
    """A family whose transformer reads patches of 2 x 2 latents as tokens.

    `L` is `(rows, columns, 4 * channels)`: the pipeline's own packed latents `[B, rows * columns, 4 * channels]`
    on their grid, the same numbers in the same order. So a `reshape` leads from one to the other, and latents
    carry their image's proportions with them.

    `velocity` takes the scheduler's timesteps, up to 1000, and divides them in float32; the transformer casts the
    quotient to its own dtype, and multiplies it there. Timesteps that an engine rounded before are thereby replayed
    exactly.
    """

    def latent_shape(self, height: int | None, width: int | None) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        native = self.pipeline.default_sample_size * factor
        height, width = height or native, width or native
        check_size(height, width, 2 * factor)
        return (height // (2 * factor), width // (2 * factor), self.transformer.config.in_channels)

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        rows, columns, _ = latent_shape
        return rows * columns

    def schedule(self, num_inference_steps: int, latent_shape: tuple[int, ...]) -> Schedule:
        return linear_schedule(self.pipeline.scheduler, num_inference_steps, self.image_tokens(latent_shape))

    def in_dtype(self, schedule: Schedule, dtype: torch.dtype) -> Schedule:
        timesteps = torch.tensor(schedule.timesteps, dtype=torch.float64) / 1000
        return replace(schedule, timesteps=tuple((timesteps.to(dtype) * 1000).tolist()))

    @staticmethod
    def unpack(latents: Tensor) -> Tensor:
        """`[B, rows, columns, 4 * channels]` as the VAE's `[B, channels, 2 * rows, 2 * columns]`."""
        patches = latents.unflatten(-1, (-1, 2, 2)).permute(0, 3, 1, 4, 2, 5)
        return patches.flatten(4, 5).flatten(2, 3)
