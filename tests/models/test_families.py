"""Each family draws as its pipeline's own call does, is scored and trained alike, and its adapter loads there."""

from dataclasses import replace

import pytest
import torch
from tiny_pipelines import connect

from flowcorr.errors import ConfigError
from flowcorr.models import Guidance
from tests.models.families import CASES, assert_is_the_pipelines_own_call
from tests.models.learning import (
    assert_an_adapter_is_learned_and_loads,
    assert_both_stacks_round_alike,
    assert_log_probs_are_those_of_a_loop,
    in_bfloat16,
)


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


@pytest.fixture
def path(case, tiny_folders):
    return tiny_folders(case.name)


@pytest.fixture(scope="module")
def loaded():
    return {}


@pytest.fixture
def family(case, path, loaded):
    if case not in loaded:
        loaded[case] = case.load(path)
    return loaded[case]


def test_shape_of_a_sample(case, family):
    height, width = case.tiny.size
    assert family.name == case.name.removesuffix("22_ti2v")
    assert family.sample_shape(height, width, case.tiny.frames) == case.shape
    assert family.sample_shape(None, None, None) == case.native


@pytest.mark.parametrize("key", ["height", "width"])
def test_a_size_between_patches_is_an_error(case, family, key):
    size = {name: value for name, value in case.size.items() if name != "num_frames"}
    size[key] += case.multiple // 2
    with pytest.raises(ConfigError, match=rf"^sampling\.{key}={size[key]} .* {case.multiple}, "):
        family.latent_shape(**size)


@pytest.mark.parametrize("is_guided", [False, True], ids=["plain", "guided"])
def test_a_family_draws_as_the_pipelines_own_call(case, family, is_guided):
    guidance, num_steps = (case.guided, 4) if is_guided else (Guidance(), case.fewest_steps)
    assert_is_the_pipelines_own_call(case, family, guidance, num_steps)


@torch.no_grad()
def test_velocity_depends_on_prompt_reference_and_place(case, family):
    first, second = case.prompts
    prompts = [first, replace(second, images=first.images), replace(first, images=second.images)]
    conditioning = family.encode(prompts, case.guided)
    same, timesteps = case.noise(batch=1).repeat(3, *(1 for _ in case.shape)), torch.full((3,), 500.0)
    got = family.velocity(family.transformer, same, timesteps, conditioning, case.guided)
    assert (got[0] - got[1]).abs().max() > 1e-3
    assert not first.images or (got[0] - got[2]).abs().max() > 1e-3
    turned = family.velocity(family.transformer, same.flip(-2), timesteps, conditioning, case.guided)
    assert (turned.flip(-2) - got).abs().max() > 1e-5


@pytest.mark.parametrize("is_guided", [False, True], ids=["plain", "guided"])
def test_log_probs_equal_an_independent_loop(case, path, make_config, is_guided):
    guidance = case.guided if is_guided else Guidance(negative_prompt=case.guided.negative_prompt)
    scale = {key: getattr(guidance, key) for key in case.tiny.guidance}
    connected = connect(make_config(**case.sections(path, **scale)), case.prompts)
    assert_log_probs_are_those_of_a_loop(connected, case, guidance)


def test_one_update_and_its_adapter_loads_into_a_pipeline(case, path, family, make_config, tmp_path):
    connected = _, actor, _, _ = connect(make_config(**case.sections(path)), case.prompts)
    assert len(actor.weights.parameters) == case.adapter_tensors
    conditioning = family.encode(case.prompts, case.guided)
    inputs = (case.noise(), torch.tensor([900.0, 300.0]), conditioning, case.guided)
    size = (*([case.tiny.frames] if case.tiny.frames else []), *case.tiny.size)
    assert_an_adapter_is_learned_and_loads(connected, case.load(path), inputs, tmp_path, size)


@torch.no_grad()
def test_a_bfloat16_transformer_computes_with_the_timesteps_of_its_schedule(case, path):
    family = case.load(path, dtype="bfloat16")
    conditioning = family.encode(case.prompts[:1], case.guided)
    exact = family.schedule(10, case.shape)
    rounded = family.in_dtype(exact, torch.bfloat16)
    assert rounded.sigmas == exact.sigmas
    assert (rounded.timesteps != exact.timesteps) == case.rounds_timesteps
    assert rounded.timesteps == pytest.approx(exact.timesteps, rel=2**-7)
    assert family.in_dtype(exact, torch.float32).timesteps == pytest.approx(exact.timesteps, rel=1e-7)
    for timesteps in zip(exact.timesteps, rounded.timesteps, strict=True):
        first, second = (
            family.velocity(
                family.transformer, case.noise(batch=1), torch.tensor([t]), conditioning, case.guided
            )
            for t in timesteps
        )
        assert torch.equal(first, second)


def test_both_stacks_round_alike_in_bfloat16(case, path, make_config):
    sections = in_bfloat16(case.sections(path, sde_window_range=(1, 4)))
    assert_both_stacks_round_alike(connect(make_config(**sections), case.prompts))
