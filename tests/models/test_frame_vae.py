"""The decoder that Qwen-Image and Wan share."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flowcorr.models.frame_vae import decode_frames


@dataclass
class Vae:
    """Clamps the pixels of its decoder, which gets one latent frame after the other, as diffusers' do."""

    dtype: torch.dtype = torch.float32
    decoder: nn.Module = field(default_factory=nn.Identity)
    config: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(latents_mean=[1.0, 0.0, -1.0], latents_std=[2.0, 1.0, 0.5])
    )

    def decode(self, latents, return_dict):
        frames = [self.decoder(frame) for frame in latents.split(1, dim=2)]
        return (torch.cat(frames, dim=2).clamp(-1, 1),)


def test_latents_get_their_scale_back():
    latents = torch.rand(2, 3, 4, 2, 2) / 4
    pixels = decode_frames(Vae(), latents)
    assert torch.equal(pixels[:, 1], latents[:, 1])
    assert torch.equal(pixels[:, 0], torch.ones_like(pixels[:, 0]))
    torch.testing.assert_close(pixels[:, 2], latents[:, 2] / 2 - 1)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("frame", [0, 3])
def test_one_pixel_of_one_frame_that_is_not_finite_marks_its_sample(bad, frame):
    latents = torch.zeros(3, 3, 4, 2, 2)
    latents[1, 0, frame, 0, 0] = bad
    pixels = decode_frames(Vae(), latents)
    assert pixels[1].isnan().all()
    assert pixels[[0, 2]].isfinite().all()
