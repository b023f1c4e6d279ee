"""The decoder that Qwen-Image and Wan share."""

import math

import pytest
import torch
from tiny_pipelines import PIPELINES

from flowcorr.models.frame_vae import decode_frames

CLASSES = {
    "wan": "AutoencoderKLWan",
    "wan22_ti2v": "AutoencoderKLWan",
    "qwen_image": "AutoencoderKLQwenImage",
}


@pytest.fixture(scope="module", params=CLASSES)
def vae(request, tmp_path_factory):
    import diffusers

    path = PIPELINES[request.param].build(tmp_path_factory.mktemp(request.param))
    return getattr(diffusers, CLASSES[request.param]).from_pretrained(path, subfolder="vae")


def noise(vae, num_samples=2):
    """Of three latent frames, or of the one of an image."""
    is_image = "QwenImage" in type(vae).__name__
    draw = torch.Generator().manual_seed(0)
    return torch.randn(num_samples, vae.config.z_dim, 1 if is_image else 3, 4, 6, generator=draw)


@torch.no_grad()
def test_pixels_are_the_vaes_own_of_latents_that_get_their_scale_back(vae):
    latents = noise(vae)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    expected = vae.decode(latents * std + mean).sample
    torch.testing.assert_close(decode_frames(vae, latents).clamp(-1, 1), expected, rtol=0, atol=0)
    assert expected.std() > 0.01
    assert not vae.decoder._forward_hooks


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@torch.no_grad()
def test_a_latent_that_is_not_finite_marks_its_sample(vae, bad):
    latents = noise(vae, 3)
    latents[1, 0, -1, 0, 0] = bad
    finite = decode_frames(vae, latents).isfinite()
    assert not finite[1].all()
    assert finite[[0, 2]].all()


@torch.no_grad()
def test_an_infinite_pixel_is_not_clamped(vae):
    bias = next(module for name, module in vae.decoder.named_modules() if name == "conv_out").bias
    before = bias[0].item()
    bias[0] = math.inf
    pixels = decode_frames(vae, noise(vae, 1))
    bias[0] = before
    assert pixels.isposinf().any()
    assert not pixels.isnan().any()
