"""Usual mistakes with images, timesteps and a VAE's numbers, in words: of an engine at hand and of captured samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flowcorr.models import ModelFamily

FLIPS: Mapping[str, int] = {
    "with red and blue exchanged": -1,
    "mirrored": -2,
    "upside down": -3,
}
"""The flipped axis of images `[..., H, W, 3]`."""
OTHER_TIMESTEPS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "truncated to integers": torch.trunc,
    "rounded to integers": torch.round,
    "divided by 1000": lambda timesteps: timesteps / 1000,
    "times 1000": lambda timesteps: timesteps * 1000,
}


def scalings(family: ModelFamily) -> Iterator[tuple[str, dict[str, Any]]]:
    """Wrong uses of the VAE's scale and shift in words, and the numbers that its configuration has then."""
    config = family.pipeline.vae.config
    scale, shift = getattr(config, "scaling_factor", None), getattr(config, "shift_factor", None) or 0.0
    if scale:
        changed = {
            "without the VAE's scaling and shift": (1.0, 0.0),
            "without the VAE's scaling factor": (1.0, shift),
            "without the VAE's shift": (scale, 0.0),
            "with the VAE's scaling and shift applied twice": (scale**2, shift / scale + shift),
            "with the VAE's scaling factor applied twice": (scale**2, shift),
            "times the VAE's scaling factor, which divides them": (1 / scale, shift),
            "with the VAE's shift subtracted": (scale, -shift),
        }
        names = ("scaling_factor", "shift_factor")
        numbers = {words: dict(zip(names, values, strict=True)) for words, values in changed.items()}
        own: dict[str, Any] = {"scaling_factor": scale, "shift_factor": shift}
    elif getattr(config, "latents_std", None):
        mean, std = list(config.latents_mean), list(config.latents_std)
        own = {"latents_mean": mean, "latents_std": std}
        zeros, ones = [0.0] * len(mean), [1.0] * len(std)
        squares = [value**2 for value in std]
        both = [shift * (1 + factor) for shift, factor in zip(mean, std, strict=True)]
        numbers = {
            "without the VAE's mean and std of latents": {"latents_mean": zeros, "latents_std": ones},
            "without the VAE's std of latents": {"latents_mean": mean, "latents_std": ones},
            "without the VAE's mean of latents": {"latents_mean": zeros, "latents_std": std},
            "with the VAE's mean and std of latents applied twice": {
                "latents_mean": both,
                "latents_std": squares,
            },
            "divided by the VAE's std of latents, which multiplies them": {
                "latents_mean": mean,
                "latents_std": [1 / value for value in std],
            },
        }
    else:
        return
    yield from ((words, changes) for words, changes in numbers.items() if changes != own)


@contextmanager
def configured(family: ModelFamily, changes: Mapping[str, Any]) -> Iterator[None]:
    """The VAE with other numbers in its configuration."""
    vae = family.pipeline.vae
    before = {name: getattr(vae.config, name, None) for name in changes}
    vae.register_to_config(**changes)
    try:
        yield
    finally:
        vae.register_to_config(**before)
