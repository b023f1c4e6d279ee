"""The decoder of Qwen-Image and Wan, which decodes one latent frame after the other."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def encode_frames(vae: Any, pixels: Tensor) -> Tensor:
    """Latents `[B, C, f, h, w]`, of mean 0 and std 1 over images, of pixels `[B, 3, F, H, W]` in [-1, 1]."""
    mean, std = _scale(vae, pixels)
    return (vae.encode(pixels).latent_dist.mode() - mean) / std


def decode_frames(vae: Any, latents: Tensor) -> Tensor:
    """Pixels `[B, 3, F, H, W]` of latents `[B, C, f, h, w]`, NaN in each sample of which a pixel is not finite.

    diffusers clamps the pixels of this decoder, which makes an infinite one a white or a black one.
    """
    mean, std = _scale(vae, latents)
    known: list[Tensor] = []

    def judge(module: nn.Module, inputs: tuple[Any, ...], pixels: Tensor) -> None:
        known.append(pixels.isfinite().flatten(1).all(1))

    hook = vae.decoder.register_forward_hook(judge)
    try:
        pixels = vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0]
    finally:
        hook.remove()
    pixels[~torch.stack(known).all(0)] = math.nan
    return pixels


def _scale(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std of the VAE's latents, `[1, C, 1, 1, 1]`."""
    mean, std = (
        like.new_tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std
