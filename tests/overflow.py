"""VAEs whose pixels are not finite while their latents are."""

from __future__ import annotations

import torch

from flowcorr.rollout import decode


def overflow(vae, layer: str = "conv_in") -> None:
    """Scale the decoder's first convolution, behind which a norm overflows, or its last one, which overflows itself."""
    weight = getattr(vae.decoder, layer).weight
    weight.data = weight.sign() * torch.finfo(weight.dtype).max


@torch.no_grad()
def overflow_one(family, latents: torch.Tensor) -> int:
    """Scale the decoder's last convolution until just one of `latents` `[B, *L]` overflows; its place."""
    decoder = family.pipeline.vae.decoder
    if hasattr(decoder, "norm_out"):  # Qwen-Image's: its weights would overflow before the pixels
        decoder.norm_out.gamma.data *= 100
    last = decoder.conv_out
    weight, bias = last.weight.clone(), last.bias.clone()
    low, high = 1.0, torch.finfo(weight.dtype).max
    for _ in range(30):
        scale = (low * high) ** 0.5
        last.weight.copy_(weight * scale)
        last.bias.copy_(bias * scale)
        places = (~decode(family, latents)[1]).nonzero().flatten().tolist()
        if len(places) == 1:
            return places[0]
        low, high = (low, scale) if places else (scale, high)
    raise AssertionError("no image overflows alone")
