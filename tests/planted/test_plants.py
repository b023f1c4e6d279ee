"""Ways to plant a fault: each changes what it says, and nothing else."""

import math

import pytest
import torch

from tests.planted import plants


@pytest.fixture
def engine(make_run):
    run = make_run()
    run.stir()
    engine = plants.own_engine(run.actor, run.config)
    engine.sync(run.actor.weights.snapshot())
    engine.run = run
    return engine


def sampled(engine):
    return engine.sample(engine.run.conditioning, range(2), training_step=1, with_means=True)


def test_an_engine_of_its_own_samples_as_the_trainer_does(engine):
    ours, theirs = sampled(engine), engine.run.sample()
    assert torch.allclose(ours.window.means, theirs.window.means, atol=1e-5)
    assert not engine.shared
    assert engine.transformer is not engine.run.engine.transformer


def test_a_fault_leaves_the_trainer_as_it_is(engine):
    expected = engine.run.sample().window.latents
    for plant in (
        plants.noisy(lambda noise: 2 * noise),
        plants.feeding(lambda timesteps: timesteps / 2),
        plants.another_vae(0.5),
        plants.sampling_with(noise_level=0.1),
    ):
        plant(engine)
    sampled(engine)
    assert torch.equal(engine.run.sample().window.latents, expected)


def test_returned_values_are_computed_from_the_true_ones(engine):
    true = sampled(engine)
    plants.returning(
        log_probs=lambda rollout: rollout.log_probs + 1, stds=lambda rollout: rollout.window.stds / 2
    )(engine)
    found = sampled(engine)
    assert torch.equal(found.log_probs, true.log_probs + 1)
    assert torch.equal(found.window.stds, true.window.stds / 2)
    assert torch.equal(found.window.latents, true.window.latents)


def test_noise_may_be_drawn_for_other_ids(engine):
    plants.seeded(lambda ids: {**ids, "groups": [0] * len(ids["groups"])})(engine)
    noise = engine.step_noise([0, 1], [2, 2], seed=0, training_step=1, step_index=0)
    assert torch.equal(*noise)


def test_a_fault_at_some_steps_leaves_the_others(engine):
    seen = []

    def zero(velocity, transformer, latents, timesteps, *rest):
        seen.append(float(timesteps[0]))
        return velocity(transformer, latents, timesteps, *rest)

    plants.at_steps(lambda engine: range(1, 3), zero)(engine)
    sampled(engine)
    assert sorted(set(seen), reverse=True) == pytest.approx(engine.plan.schedule.timesteps[1:3])


def test_uniform_noise_has_unit_variance():
    noise = plants.uniform(torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
    assert noise.std().item() == pytest.approx(1, abs=0.01)
    assert noise.abs().max().item() <= math.sqrt(3)
