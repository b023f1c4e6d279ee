from dataclasses import replace

import pytest
import torch
from tiny_pipelines import build_tiny_sd35
from torch import nn

from tests.actor.updates import assert_same, updated
from tests.tolerances import GRADIENTS, LOG_PROBS, MEANS


@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
@pytest.mark.parametrize("fold", [True, False])
def test_the_actor_scores_as_the_engine_did(make_run, sde_type, fold):
    run = make_run(sampling={"sde_type": sde_type, "noise_level": 0.5}, actor={"fold_steps": fold})
    run.stir()
    rollout = run.sample()
    scores = run.actor.log_probs(rollout, with_means=True)
    # An error of the mean counts in units of the std, which is 0.001 at the last step of cps.
    error = MEANS["atol"] / (rollout.window.stds * rollout.num_elements**0.5)
    assert ((scores.log_probs - rollout.log_probs).abs() <= LOG_PROBS["atol"] + error).all()
    torch.testing.assert_close(scores.means, rollout.window.means, **MEANS)
    policy = run.actor.score(rollout)
    torch.testing.assert_close(policy.stds, rollout.window.stds)
    assert policy.log_probs.requires_grad
    assert not scores.log_probs.requires_grad
    assert run.actor.log_probs(rollout).means is None


def test_the_unscaled_cps_log_prob_is_replayed(make_run):
    run = make_run(sampling={"sde_type": "cps", "noise_level": 0.5, "cps_unscaled": True})
    rollout = run.sample()
    torch.testing.assert_close(
        run.actor.log_probs(rollout).log_probs, rollout.log_probs, rtol=1e-4, atol=1e-7
    )
    assert (rollout.log_probs < 0).all()


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_change_no_log_prob(make_run, size):
    run = make_run(actor={"micro_batch_size": size})
    rollout = run.sample()
    torch.testing.assert_close(run.actor.log_probs(rollout).log_probs, rollout.log_probs, **LOG_PROBS)


def test_by_default_no_forward_pass_takes_more_than_a_mini_batch(make_run):
    """Also in the recompute, whose batch is the whole step's."""
    run = make_run(rollout={"prompts_per_step": 3, "n": 2}, actor={"mini_batches": 2})
    assert run.actor.scorer.micro_batches(6) == [slice(0, 4), slice(4, 8)]


def test_the_timesteps_of_the_rollout_are_replayed(make_run):
    run = make_run()
    rollout = run.sample()
    rounded = replace(rollout, window=replace(rollout.window, timesteps=rollout.window.timesteps + 5.0))
    difference = run.actor.log_probs(rounded).log_probs - run.actor.log_probs(rollout).log_probs
    assert difference.abs().max() > 1e-5


def test_autocast_rounds_and_stays_close(make_run):
    run, plain = make_run(actor={"autocast": True}), make_run()
    rollout = plain.sample()
    gap = run.actor.log_probs(rollout).log_probs - plain.actor.log_probs(rollout).log_probs
    assert gap.dtype == torch.float32
    assert 1e-7 < gap.abs().max() < 1e-2
    step = rollout.step(0)
    velocity, exact = (
        actor.velocity(step.sample_conditioning(repeats=1))(
            step.window.latents[:, 0], step.window.timesteps[:, 0]
        )
        for actor in (run.actor, plain.actor)
    )
    assert 1e-5 < (velocity - exact).abs().max() < 0.1
    assert run.update(plain.batch(rollout), training_step=1).compute()["actor/updates"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
# torch hides this warning, unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_transformer_computes_the_same(make_run):
    compiled, metrics = updated(make_run, actor={"compile": True})
    plain, expected = updated(make_run)
    assert_same(compiled.gradient(), plain.gradient(), **GRADIENTS)
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_every_kind_of_block_stays_compiled(make_run, tmp_path, monkeypatch):
    """With and without gradients, and under the reference policy: more compilations than torch allows by default."""
    compiled = nn.Module.compile
    # Kinds are told apart before code is generated, which would take minutes.
    monkeypatch.setattr(nn.Module, "compile", lambda block, **key: compiled(block, **key, backend="eager"))
    path = str(build_tiny_sd35(tmp_path / "sd35"))
    run = make_run(model={"path": path}, actor={"compile": True, "kl_coef": 0.1})
    batch = run.batch()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        run.update(batch)
        run.update(batch)
