import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_pipelines import build_tiny_sd35
from torch import nn

from flowcorr.actor.scoring import distinct_inputs
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


@pytest.mark.parametrize(
    ("size", "folded", "rows"),
    [(8, False, [2, 8]), (8, True, [10]), (2, False, [1, 2] * 4), (3, True, [4, 5, 3]), (1, False, [1] * 16)],
)
def test_equal_latents_of_a_prompt_are_one_row_of_a_pass(make_run, size, folded, rows):
    """Two prompts with four images each, which part at the first of two SDE steps."""
    run = make_run(actor={"micro_batch_size": size, "fold_steps": folded})
    rollout, passed = run.sample(), []
    starts = rollout.window.latents[:, 0]
    assert torch.equal(starts, starts[[0, 0, 0, 0, 4, 4, 4, 4]])
    hook = run.actor.weights.transformer.register_forward_hook(lambda *call: passed.append(len(call[2][0])))
    torch.testing.assert_close(run.actor.log_probs(rollout).log_probs, rollout.log_probs, **LOG_PROBS)
    hook.remove()
    assert passed == rows

    weights = torch.linspace(-1, 1, 16).view(8, 2)
    shared = run.actor.config
    apart = replace(shared, rollout=replace(shared.rollout, same_initial_noise=False))
    gradients = []
    for config in (shared, apart):
        run.actor.scorer.config = config
        run.actor.optimizer.adamw.zero_grad()
        (weights * run.actor.score(rollout).log_probs).sum().backward()
        gradients.append(run.gradient())
    assert_same(*gradients, **GRADIENTS)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=12))
def test_rows_like_the_first_of_their_prompt_and_timestep_are_left_out(rows):
    latents, timesteps, prompts = torch.tensor(rows, dtype=torch.float64).T
    kept, places = distinct_inputs(latents[:, None, None], timesteps, prompts)
    firsts = {}
    for row, inputs in enumerate(rows):
        firsts.setdefault(inputs[1:], row)
    left_out = {row for row, inputs in enumerate(rows) if rows[firsts[inputs[1:]]] == inputs} - {
        *firsts.values()
    }
    assert kept.tolist() == [row for row in range(len(rows)) if row not in left_out]
    assert [rows[kept[place]] for place in places.tolist()] == rows


def test_latents_that_are_not_finite_are_rows_of_their_own():
    latents = torch.tensor([[math.nan], [math.nan], [1.0], [1.0]])
    rows, places = distinct_inputs(latents, torch.zeros(4), torch.tensor([0, 0, 1, 1]))
    assert (rows.tolist(), places.tolist()) == ([0, 1, 2], [0, 1, 2, 2])


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
        actor.velocity(step.sample_conditioning())(step.window.latents[:, 0], step.window.timesteps[:, 0])
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
