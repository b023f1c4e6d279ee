"""Flipped images, and a VAE that scales its latents otherwise for a while."""

import pytest
import torch
from tiny_pipelines import build_tiny_flux_kontext

from flowcorr.config import ModelConfig
from flowcorr.instruments.doctor.mistakes import FLIPS, configured, scalings
from flowcorr.models import load_family
from tests.shallow import SHALLOW


@pytest.fixture(params=["sd3", "flux_kontext"])
def family(request, tmp_path):
    path = SHALLOW if request.param == "sd3" else build_tiny_flux_kontext(tmp_path)
    return load_family(ModelConfig(path=str(path)))


def test_flips_exchange_channels_columns_or_rows():
    image = torch.arange(2 * 4 * 3).view(2, 4, 3)
    flipped = {words: image.flip(axis) for words, axis in FLIPS.items()}
    assert torch.equal(flipped["with red and blue exchanged"], image[..., [2, 1, 0]])
    assert torch.equal(flipped["mirrored"], image[:, [3, 2, 1, 0]])
    assert torch.equal(flipped["upside down"], image[[1, 0]])


def test_each_wrong_use_decodes_otherwise_and_the_numbers_come_back(family):
    before = dict(family.pipeline.vae.config)
    latents = torch.randn(1, *family.sample_shape(32, 32, None), generator=torch.Generator().manual_seed(0))
    own, seen = family.decode(latents), []
    for words, changes in scalings(family):
        with configured(family, changes):
            seen.append(family.decode(latents))
        assert not torch.allclose(seen[-1], own), words
    assert len(seen) == 7
    assert dict(family.pipeline.vae.config) == before
