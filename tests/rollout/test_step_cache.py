"""Feature caching: which steps leave blocks out, and that neither windows nor anything after sampling notice."""

import pytest
import torch

from flowcorr.errors import ConfigError
from flowcorr.models.base import repeated_blocks
from flowcorr.models.z_image import ZImage
from flowcorr.rollout import sample_ode
from flowcorr.rollout.step_cache import check_cached
from tests.tolerances import LOG_PROBS

STEPS = 8
ALWAYS = 1e9  # the threshold at which every step that may leave blocks out does


@pytest.fixture
def make_cached(make_run):
    def make(cache="first_block", window_range=(3, 5), window_per="group"):
        sampling = {
            "num_inference_steps": STEPS, "sde_window_range": window_range, "window_per": window_per,
        }  # fmt: skip
        return make_run(sampling=sampling, rollout={"cache": cache, "cache_threshold": ALWAYS})

    return make


def full_steps(run, sample=None):
    """What `sample` returns (a rollout by default), and the steps that computed the second block."""
    computed, step = [], [-1]
    first, second = repeated_blocks(run.family.transformer)[:2]
    hooks = [
        first.attn.register_forward_pre_hook(lambda *_: step.__setitem__(0, step[0] + 1)),
        second.attn.register_forward_pre_hook(lambda *_: computed.append(step[0])),
    ]
    sampled = run.sample() if sample is None else sample()
    for hook in hooks:
        hook.remove()
    assert step[0] == STEPS - 1
    return sampled, computed


def test_a_window_and_the_first_steps_beside_it_are_computed_in_full(make_cached):
    _, computed = full_steps(make_cached())
    assert computed == [0, 3, 4, 5]


def test_a_step_is_exact_where_it_is_stochastic_for_any_sample(make_cached):
    rollout, computed = full_steps(make_cached(window_range=(1, 7), window_per="sample"))
    assert len(rollout.window.step_indices.unique(dim=0)) > 2
    stochastic = set(rollout.window.step_indices.flatten().tolist())
    begins = {step for step in range(STEPS) if step not in stochastic and step - 1 in {-1, *stochastic}}
    assert set(computed) == stochastic | begins
    assert len(computed) < STEPS


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_log_probs_of_the_window_are_those_without_a_cache(make_run, guidance_scale):
    sampling = {"num_inference_steps": STEPS, "sde_window_range": (1, 6), "guidance_scale": guidance_scale}
    runs = [make_run(sampling=sampling, rollout={"cache": cache, "cache_threshold": ALWAYS})
            for cache in ("none", "first_block")]  # fmt: skip
    rollouts = []
    for run in runs:
        run.stir()
        rollouts.append(run.sample())
        torch.testing.assert_close(
            run.actor.log_probs(rollouts[-1]).log_probs, rollouts[-1].log_probs, **LOG_PROBS
        )
    plain, cached = rollouts
    assert (plain.final_latents - cached.final_latents).abs().max() > 1e-3


def test_no_state_reaches_the_next_batch(make_cached):
    run = make_cached()
    before = run.sample(1)
    run.sample(2)
    assert torch.equal(run.sample(1).final_latents, before.final_latents)


def test_a_run_without_the_key_has_no_hook(make_cached):
    run = make_cached(cache="none")
    _, computed = full_steps(run)
    assert computed == list(range(STEPS))
    assert not any(hasattr(module, "_diffusers_hook") for module in run.family.transformer.modules())


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_is_left_after_sampling(make_cached, fails):
    run = make_cached()
    if fails:
        handle = run.family.transformer.norm_out.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.sample()
        handle.remove()
    else:
        run.sample()
    for block in repeated_blocks(run.family.transformer):
        assert block.forward.__func__ is type(block).forward


def test_families_that_diffusers_cannot_hook_are_refused(make_run):
    family = make_run().family
    check_cached(family)
    family.name, family.blocks_can_be_cached = ZImage.name, ZImage.blocks_can_be_cached
    with pytest.raises(ConfigError, match=r"rollout\.cache='first_block' cannot cache .* z_image"):
        check_cached(family)


def test_blocks_that_diffusers_does_not_know_are_refused(make_run):
    family = make_run().family
    family.pipeline.transformer = torch.nn.Sequential()
    family.pipeline.transformer.transformer_blocks = torch.nn.ModuleList(
        [torch.nn.Identity(), torch.nn.Identity()]
    )
    with pytest.raises(ConfigError, match="does not hook its blocks"):
        check_cached(family)


def test_what_else_samples_with_the_actor_does_so_without_it(make_cached):
    run = make_cached()
    initial, velocity = run.sample().window.latents[:2, 0], run.actor.velocity(run.conditioning)
    _, computed = full_steps(run, lambda: sample_ode(velocity, initial, run.engine.plan.schedule))
    assert computed == list(range(STEPS))
