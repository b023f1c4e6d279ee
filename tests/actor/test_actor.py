"""The actor as a whole."""

import pytest
import torch

from flowcorr.correction import OFF
from tests.actor.updates import assert_same, updated
from tests.tolerances import GRADIENTS


def test_gradient_checkpointing_changes_no_gradient(make_run):
    checkpointed, _ = updated(make_run, actor={"gradient_checkpointing": True})
    plain, _ = updated(make_run)
    assert checkpointed.actor.weights.transformer.gradient_checkpointing
    assert_same(checkpointed.gradient(), plain.gradient(), **GRADIENTS)


def test_guidance_reaches_the_gradient(make_run):
    run, metrics = updated(make_run, sampling={"guidance_scale": 2.0})
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/grad_norm"] > 0


def test_an_update_learns_where_gradients_were_turned_off(make_run):
    """As by a reward that calls `torch.set_grad_enabled(False)`, or whose module does."""
    plain, _ = updated(make_run)
    with torch.no_grad():
        run = make_run()
        run.stir()
        batch = run.batch()
        metrics = run.actor.update(batch, OFF, training_step=1).metrics.compute()
        assert not torch.is_grad_enabled()
    assert metrics["actor/grad_norm"] > 0
    assert_same(run.gradient(), plain.gradient(), **GRADIENTS)


def test_the_velocity_is_that_of_the_trained_weights(make_run):
    run = make_run()
    rollout = run.sample()
    velocity = run.actor.velocity(rollout.sample_conditioning())
    before = velocity(rollout.window.latents[:, 0], rollout.window.timesteps[:, 0])
    assert before.shape == rollout.window.latents[:, 0].shape
    run.stir()
    after = velocity(rollout.window.latents[:, 0], rollout.window.timesteps[:, 0])
    assert not torch.equal(after, before)
    assert run.actor.device == after.device
