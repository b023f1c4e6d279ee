"""FLUX, FLUX Kontext, Qwen-Image and Ovis-Image against loops written with diffusers' pieces."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_pipelines import connect

from flowcorr.errors import ConfigError
from flowcorr.models.packed import PackedFamily, positions
from flowcorr.rollout import decode
from tests.models.learning import (
    assert_an_adapter_is_learned_and_loads,
    assert_both_stacks_round_alike,
    assert_log_probs_are_those_of_a_loop,
    in_bfloat16,
)
from tests.models.packed import (
    FLUX,
    KONTEXT,
    OVIS,
    QWEN,
    SHAPE,
    assert_ode_is_the_pipelines,
    assert_velocity_is_the_pipelines,
    noise,
)

FAMILIES = (FLUX, KONTEXT, QWEN, OVIS)
GUIDED = [
    pytest.param(packed, guidance, id=f"{packed.name} {number}")
    for packed in FAMILIES
    for number, guidance in enumerate(packed.guidances)
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {packed.name: str(packed.build(tmp_path_factory.mktemp(packed.name))) for packed in FAMILIES}


@pytest.fixture(scope="module")
def families(paths):
    return {packed.name: packed.load(paths[packed.name]) for packed in FAMILIES}


@pytest.fixture(params=FAMILIES, ids=lambda packed: packed.name)
def packed(request):
    return request.param


@pytest.fixture
def path(packed, paths):
    return paths[packed.name]


@pytest.fixture
def family(packed, families):
    return families[packed.name]


def test_packed_latents_are_the_grid_of_their_patches():
    channels, rows, columns = 3, 2, 4
    image = torch.arange(channels * 4.0 * rows * columns).view(1, channels, 2 * rows, 2 * columns)
    patches = image.view(1, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
    assert torch.equal(PackedFamily.unpack(patches.reshape(1, rows, columns, -1)), image)


def test_latent_shape(packed, family):
    assert family.name == packed.name
    assert family.latent_shape(*packed.size) == SHAPE
    assert family.latent_shape(None, None) == (64, 64, 16)  # default_sample_size 128, patches of 2


@pytest.mark.parametrize("key", ["height", "width"])
def test_a_size_between_patches_is_an_error(packed, family, key):
    size = dict(zip(("height", "width"), packed.size, strict=True))
    size[key] += packed.multiple // 2
    with pytest.raises(ConfigError, match=rf"^sampling\.{key}={size[key]} .* {packed.multiple}, "):
        family.latent_shape(**size)


@pytest.mark.parametrize(
    ("packed", "steps", "shape"),
    [(FLUX, 1, SHAPE), (QWEN, 2, SHAPE), (OVIS, 1, SHAPE), *((packed, 5, SHAPE) for packed in FAMILIES)]
    + [(packed, 10, (64, 64, 16)) for packed in FAMILIES],
    indirect=["packed"],
)
def test_the_schedule_is_the_pipelines(packed, family, steps, shape):
    schedule = family.schedule(steps, shape)
    sigmas, timesteps = packed.schedule(family.pipeline, steps, shape[0] * shape[1])
    assert schedule.sigmas == pytest.approx(sigmas, abs=1e-7)
    assert schedule.timesteps == pytest.approx(timesteps, abs=1e-4)
    assert (schedule.sigmas[0], schedule.sigmas[-1]) == (1.0, 0.0)


@pytest.mark.parametrize(("packed", "guidance"), GUIDED, indirect=["packed"])
def test_velocity_is_the_pipelines_in_one_forward(packed, family, guidance):
    assert_velocity_is_the_pipelines(packed, family, guidance)


@torch.no_grad()
def test_velocity_depends_on_the_prompt(packed, family):
    guidance = packed.guidances[0]
    conditioning = family.encode(packed.prompts, guidance)
    same = noise(batch=1).expand(2, *SHAPE)
    got = family.velocity(family.transformer, same, torch.full((2,), 500.0), conditioning, guidance)
    assert (got[0] - got[1]).abs().max() > 1e-3


@pytest.mark.parametrize("packed", [KONTEXT], indirect=True)
@torch.no_grad()
def test_velocity_depends_on_the_reference(packed, family):
    first, second = packed.prompts
    prompts = [first, replace(second, text=first.text)]
    same = noise(batch=1).expand(2, *SHAPE)
    conditioning = family.encode(prompts, packed.guidance)
    got = family.velocity(family.transformer, same, torch.full((2,), 500.0), conditioning, packed.guidance)
    assert (got[0] - got[1]).abs().max() > 1e-3


@pytest.mark.parametrize(("packed", "guidance"), GUIDED, indirect=["packed"])
def test_the_ode_sampler_is_the_pipelines_own_call(packed, family, guidance):
    assert_ode_is_the_pipelines(packed, family, guidance)


@torch.no_grad()
def test_decode_is_the_pipelines_own(packed, family):
    pipe, latents = family.pipeline, noise()
    got, finite = decode(family, latents)
    # The pipeline's own unpacking, which only its `__call__` uses.
    unpacked = pipe._unpack_latents(latents.flatten(1, 2), *packed.size, pipe.vae_scale_factor)
    pixels = pipe.vae.decode(packed.unscale(pipe.vae, unpacked), return_dict=False)[0]
    expected = pipe.image_processor.postprocess(pixels.reshape(2, 3, *packed.size), output_type="np")
    assert got.shape == (2, *packed.size, 3)
    assert got.dtype == torch.uint8
    assert finite.all()
    assert np.abs(got.numpy() - expected * 255).max() <= 0.51
    assert got.float().std() > 5


@pytest.mark.parametrize(("packed", "guidance"), GUIDED, indirect=["packed"])
def test_log_probs_equal_an_independent_loop(packed, path, make_config, guidance):
    scale = {key: getattr(guidance, key) for key in packed.sampling if key != "negative_prompt"}
    connected = connect(make_config(**packed.sections(path, **scale)), packed.prompts)
    schedule = packed.schedule(connected[0].pipeline, 5, SHAPE[0] * SHAPE[1])
    assert_log_probs_are_those_of_a_loop(
        connected, packed.prompts, schedule, lambda *inputs: packed.velocity(*inputs, guidance)
    )


def test_one_update_and_its_adapter_loads_into_a_pipeline(packed, path, family, make_config, tmp_path):
    connected = _, actor, _, _ = connect(make_config(**packed.sections(path)), packed.prompts)
    assert len(actor.weights.parameters) == packed.adapter_tensors
    conditioning = family.encode(packed.prompts, packed.guidance)
    inputs = (noise(), torch.tensor([900.0, 300.0]), conditioning, packed.guidance)
    assert_an_adapter_is_learned_and_loads(connected, packed.load(path), inputs, tmp_path, packed.size)


@torch.no_grad()
def test_a_bfloat16_transformer_computes_with_the_timesteps_of_its_schedule(packed, path):
    family = packed.load(path, dtype="bfloat16")
    conditioning = family.encode(packed.prompts[:1], packed.guidance)
    exact = family.schedule(10, SHAPE)
    rounded = family.in_dtype(exact, torch.bfloat16)
    assert rounded.sigmas == exact.sigmas
    assert rounded.timesteps != exact.timesteps
    assert rounded.timesteps == pytest.approx(exact.timesteps, rel=2**-7)
    assert family.in_dtype(exact, torch.float32).timesteps == pytest.approx(exact.timesteps, rel=1e-7)
    for timesteps in zip(exact.timesteps, rounded.timesteps, strict=True):
        first, second = (
            family.velocity(
                family.transformer, noise(batch=1), torch.tensor([t]), conditioning, packed.guidance
            )
            for t in timesteps
        )
        assert torch.equal(first, second)


def test_bfloat16(packed, path, make_config):
    sections = in_bfloat16(packed.sections(path, sde_window_range=(1, 4)))
    assert_both_stacks_round_alike(connect(make_config(**sections), packed.prompts))


def test_places_run_along_the_rows():
    places = positions(2, 3, device=torch.device("cpu"))
    assert places.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
