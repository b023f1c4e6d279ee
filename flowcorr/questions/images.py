"""Compares a rollout's images with the training stack's decodings of their latents."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr.questions.residual_terms import share


def image_gaps(images: Tensor, decoded: Tensor) -> Tensor:
    """Mean absolute differences `[B]` in grey levels of 255, of images `[B, ..., H, W, 3]`; one may stand for all."""
    return (images.float() - decoded.float()).abs().flatten(1).mean(1)


def image_residuals(image: Tensor, decoded: Tensor) -> dict[str, Tensor]:
    """Residuals `[1]` or `[1, 3]` of an image `[1, ..., H, W, 3]` from `decoded`, its latents decoded here.

    Returns:
        The `RESIDUALS` that begin with `image_`; NaN if an image is too plain to show a fault.
    """
    # One row a channel, of all frames.
    engine, own = (pixels.float().flatten(0, -4).permute(3, 0, 1, 2) for pixels in (image, decoded))
    residuals = engine - own
    smooth = torch.nn.functional.avg_pool2d(own, 3, stride=1, padding=1, count_include_pad=False)
    exchanged = own.flip(0) - own
    return {
        "image_error": image_gaps(image, decoded),
        "image_level": residuals.flatten(1).mean(1)[None],
        "image_contrast": share(residuals, own - own.flatten(1).mean(1)[:, None, None, None])[None],
        "image_detail": share(residuals, own - smooth)[None],
        "image_channels": share(residuals[None], exchanged[None]),
    }
