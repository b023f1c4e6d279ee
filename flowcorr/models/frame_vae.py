"""The decoder of Qwen-Image and Wan, which decodes one latent frame after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def encode_frames(vae: Any, pixels: Tensor) -> Tensor:
    """Latents `[B, C, f, h, w]`, of mean 0 and std 1 over images, of pixels `[B, 3, F, H, W]` in [-1, 1]."""
    mean, std = _scale(vae, pixels)
    return (vae.encode(pixels).latent_dist.mode() - mean) / std


def decode_frames(vae: Any, latents: Tensor) -> Tensor:
    """Pixels `[B, 3, F, H, W]` of latents `[B, C, f, h, w]`, before diffusers clamps them: an infinite one stays so.

    The VAE copies all frames so far at each latent frame, and once more where it clamps them. So a hook puts the frames
    of each latent frame into their places, and leaves the VAE none to copy: a video is in memory once.
    """
    mean, std = _scale(vae, latents)
    pixels = latents.new_empty(0)
    num_frames = (latents.shape[2] - 1) * 2 ** sum(vae.config.temperal_downsample) + 1
    done = 0

    def take(module: nn.Module, inputs: tuple[Any, ...], decoded: Tensor) -> Tensor:
        nonlocal pixels, done
        frames = _whole_pixels(vae, decoded)
        batch, channels, count, height, width = frames.shape
        if not done:
            pixels = frames.new_empty(batch, channels, num_frames, height, width)
        pixels[:, :, done : done + count] = frames
        done += count
        return decoded[:, :, :0]

    hook = vae.decoder.register_forward_hook(take)
    try:
        vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)
    finally:
        hook.remove()
    assert done == num_frames, "the VAE is neither tiled nor sliced"
    return pixels


def _whole_pixels(vae: Any, decoded: Tensor) -> Tensor:
    """Frames of the decoder as pixels; the decoder of Wan 2.2 returns patches of pixels as channels."""
    patch_size = vae.config.get("patch_size")
    if patch_size is None:
        return decoded
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    frames: Tensor = unpatchify(decoded, patch_size=patch_size)
    return frames


def _scale(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std of the VAE's latents, `[1, C, 1, 1, 1]`."""
    mean, std = (
        like.new_tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std
