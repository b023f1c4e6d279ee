"""Reference images that were prepared or placed otherwise; `checks/test_prompts.py` plants these in engines."""

import pytest
import torch
from tiny_pipelines import FLUX_SIZE, build_tiny_flux_kontext

from flowcorr.config import ModelConfig
from flowcorr.instruments.doctor.reference_inputs import placed, places, prepared
from flowcorr.models import Guidance, load_family
from tests.prompts import prompts_of


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    path = build_tiny_flux_kontext(tmp_path_factory.mktemp("kontext"))
    return load_family(ModelConfig(path=str(path), max_sequence_length=8), reference_size=FLUX_SIZE)


@pytest.fixture(scope="module")
def prompts():
    return prompts_of(["cat", "dog"], images=1)


def test_each_preparation_gives_other_latents_of_one_shape(family, prompts):
    own = family.encode_references(prompts)["references"]
    others = prepared(family, prompts, own)
    assert len(others) == 5
    assert all(rows.shape == own.shape and not torch.allclose(rows, own) for rows in others.values())
    config = family.pipeline.vae.config
    unscaled = own / config.scaling_factor + config.shift_factor
    torch.testing.assert_close(others["without the VAE's scaling"], unscaled, rtol=1e-4, atol=1e-4)
    assert torch.equal(family.encode_references(prompts)["references"], own)


def test_latents_stand_for_images_that_are_not_known(family, prompts):
    own = family.encode_references(prompts)["references"]
    others = prepared(family, (), own)
    assert "with red and blue exchanged" in others
    assert all(rows.shape == own.shape for rows in others.values())


def test_places_of_references_alone_change_and_come_back(family, prompts):
    guidance = Guidance(guidance_scale=3.0)
    rows = family.embed(prompts, guidance)
    shape = family.sample_shape(*FLUX_SIZE, None)
    latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    seen = []

    def velocity():
        return family.velocity(family.transformer, latents, torch.full((2,), 500.0), rows, guidance)

    hook = family.transformer.register_forward_pre_hook(
        lambda module, args, inputs: seen.append(inputs["img_ids"]), with_kwargs=True
    )
    drawn = shape[0] * shape[1]
    with torch.no_grad():
        before = velocity()
        for place in places(family.transformer).values():
            with placed(family.transformer, place, drawn):
                velocity()
        assert torch.equal(velocity(), before)
    hook.remove()
    assert all(torch.equal(ids[:drawn], seen[0][:drawn]) for ids in seen)
    assert len(places(family.transformer)) == 6
