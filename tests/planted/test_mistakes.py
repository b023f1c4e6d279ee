"""Mistakes that need more than a line: their size is what it says."""

import pytest
import torch

from tests.planted import mistakes, plants
from tests.rollouts import make_rollout


@pytest.fixture
def engine(make_run):
    run = make_run(sampling={"guidance_scale": 4.0, "num_inference_steps": 6, "sde_window_range": (1, 4)})
    return plants.own_engine(run.actor, run.config)


def test_a_shift_keeps_both_ends_of_the_schedule(engine):
    before = engine.plan.schedule
    mistakes.shifted(1.0)(engine)
    after = engine.plan.schedule
    assert (after.sigmas[0], after.sigmas[-1]) == (pytest.approx(before.sigmas[0]), 0)
    assert after.sigmas[2] > before.sigmas[2]


def test_only_the_steps_after_the_windows_change(engine):
    before = engine.plan.schedule
    assert mistakes.steps_after_windows(engine) == range(4, 6)
    mistakes.equal_tail(engine)
    after = engine.plan.schedule
    assert after.sigmas[:5] == pytest.approx(before.sigmas[:5])
    assert after.sigmas[5] == pytest.approx(before.sigmas[4] / 2)
    assert after.timesteps[:4] == before.timesteps[:4]


def test_guidance_grows_by_its_share(engine):
    mistakes.guidance_larger(0.5)(engine)
    assert engine.plan.guidance.guidance_scale == pytest.approx(5.5)
    mistakes.guidance_larger(-1.0)(engine)
    assert engine.plan.guidance.guidance_scale == 1.0


def test_layouts_and_owners_of_windows_are_exchanged(engine):
    mistakes.other_layout(engine)
    mistakes.other_owner(engine)
    assert (engine.plan.sampling.sde_window_layout, engine.plan.sampling.window_per) == (
        "scattered",
        "sample",
    )


def test_adapters_of_two_blocks_are_exchanged():
    tensors = {
        f"blocks.{block}.q.lora_B.default.weight": torch.full((2, 2), float(block)) for block in range(3)
    }
    found = mistakes.adapters_swapped(tensors, dict)
    assert [float(value[0, 0]) for value in found.values()] == [1, 0, 2]


def test_a_share_of_the_noise_is_uniform():
    class Engine:
        def step_noise(self, *ids, **seeds):
            return torch.full((4, 1000), 5.0)

    engine = Engine()
    mistakes.partly_uniform(0.25)(engine)
    assert (engine.step_noise() < 2).double().mean().item() == pytest.approx(0.25, abs=0.05)


def test_a_latent_that_is_not_finite_is_one():
    rollout = make_rollout()
    assert (~mistakes.spoiled(rollout).isfinite()).sum() == 1
    assert rollout.window.latents.isfinite().all()
