from dataclasses import replace

import pytest
import torch

from flowcorr import sde
from flowcorr.errors import BackendError
from flowcorr.instruments.doctor import examine
from flowcorr.instruments.doctor.trials import MOVE, run_trials, velocity_gap
from tests.planted.plants import returning


def test_weights_come_back_where_the_engine_fails(small_run):
    run = small_run()
    before = run.actor.weights.snapshot()
    sample, calls = run.engine.sample, []

    def dies_at_last(*args, **kwargs):
        calls.append(args)
        if len(calls) == 5:
            raise BackendError("died")
        return sample(*args, **kwargs)

    run.engine.sample = dies_at_last
    with pytest.raises(BackendError, match="^died$"):
        examine(run.actor, run.engine, run.conditioning)
    assert all(
        torch.equal(run.actor.weights.parameters[name], value) for name, value in before.tensors.items()
    )
    assert run.engine.history[-1].version == before.version


def test_weights_move_by_the_size_that_is_wanted(small_run):
    run = small_run()
    trials = run_trials(run.actor, run.engine, run.conditioning)
    moved = trials.moved
    change = velocity_gap(moved.means, trials.moved_under["current"], moved.still)
    assert change == pytest.approx(MOVE, rel=0.2)
    assert moved.rollout.policy_versions.unique().tolist() == [run.actor.weights.version + 2]


def test_velocity_gap_is_that_of_the_velocities(small_run):
    run = small_run(sampling={"sde_type": "cps"})
    rollout = run.sample()
    trials = run_trials(run.actor, run.engine, run.conditioning)
    trial = trials.base
    scaled = trial.still + 1.25 * (trial.means - trial.still)
    assert velocity_gap(scaled, trial.means, trial.still) == pytest.approx(0.25, rel=1e-5)
    assert rollout.num_steps == trial.means.shape[1]


def test_an_engine_without_step_means_cannot_be_examined(small_run):
    run = small_run(stirred=False)
    returning(means=lambda rollout: None)(run.engine)
    with pytest.raises(BackendError, match=r"Window\.means .*doctor"):
        examine(run.actor, run.engine, run.conditioning)


def test_a_later_rollout_shares_a_step_with_the_first(make_run):
    """Else noise that is equal over training steps would not show where it is seeded by step of the schedule."""
    run = make_run(
        rollout={"n": 2},
        sampling={"num_inference_steps": 10, "sde_window_size": 1, "sde_window_range": (0, 9)},
    )
    trials = run_trials(run.actor, run.engine, run.conditioning)
    both = torch.cat([trials.base.rollout.window.step_indices, trials.moved.rollout.window.step_indices], 1)
    assert (both[:, 0] == both[:, 1]).any()
    noise = [
        sde.added_noise(
            trial.rollout.window.next_latents,
            sde.Transition(trial.engine_means, trial.engine_stds, trial.rollout.window.sigmas),
        )
        for trial in (trials.base, trials.moved)
    ]
    assert not torch.equal(*noise)


def test_a_fit_finds_a_fault_beside_noise(small_run):
    run = small_run()
    trial = run_trials(run.actor, run.engine, run.conditioning).base
    draw = torch.Generator().manual_seed(0)
    fault, rounding = (torch.randn(trial.means.shape, generator=draw) for _ in range(2))
    means = trial.means + 0.1 * fault + rounding
    faulty = replace(trial, rollout=replace(trial.rollout, window=replace(trial.rollout.window, means=means)))
    fit = faulty.fit(trial.means + 0.1 * fault)
    assert fit.factor == pytest.approx(1.0, abs=4 * fit.error)
    assert fit.error == pytest.approx(10 / trial.means.numel() ** 0.5, rel=0.1)
    assert fit.share == pytest.approx(0.01, abs=0.01)


def test_a_fit_is_as_uncertain_as_differences_that_samples_have_as_a_whole(small_run):
    """Rounding of a prompt's embedding moves every element of a sample; its elements are no independent evidence."""
    run = small_run()
    trial = run_trials(run.actor, run.engine, run.conditioning).base
    draw = torch.Generator().manual_seed(0)
    fault = torch.randn(trial.means.shape, generator=draw)
    samples = len(fault)
    size = torch.tensor([0.3, -0.3]).repeat(samples)[:samples].reshape(-1, *[1] * (fault.ndim - 1))
    means = trial.means + size * fault
    faulty = replace(trial, rollout=replace(trial.rollout, window=replace(trial.rollout.window, means=means)))
    fit = faulty.fit(trial.means + fault)
    assert fit.factor == pytest.approx(0, abs=0.1)
    assert fit.error == pytest.approx(0.3 / samples**0.5, rel=0.1)


@pytest.mark.parametrize("scale", [1.5, 4.0, 20.0])
def test_two_passes_that_round_give_a_factor_of_guidance_that_is_known(small_run, scale):
    """Where the text hardly changes the velocity, the difference of both passes is the actor's own rounding."""
    run = small_run()
    trial = run_trials(run.actor, run.engine, run.conditioning).base
    draw = torch.Generator().manual_seed(0)
    engine, actor = (torch.randn(2, *trial.means.shape, generator=draw) for _ in range(2))
    guided, theirs = (scale * pair[0] - (scale - 1) * pair[1] for pair in (actor, engine))
    window = replace(trial.rollout.window, means=theirs)
    rounded = replace(
        trial, given_scores=replace(trial.scores, means=guided), rollout=replace(trial.rollout, window=window)
    )
    fit = rounded.fit(actor[0])
    assert fit.factor == pytest.approx((2 * scale - 1) / (2 * scale - 2), abs=6 * fit.error)
    assert abs(fit.factor) < fit.by_rounding + 6 * fit.error


def test_a_fault_that_is_large_beside_rounding_has_twice_the_factor_that_rounding_gives(small_run):
    run = small_run()
    trial = run_trials(run.actor, run.engine, run.conditioning).base
    draw = torch.Generator().manual_seed(0)
    fault, rounding = (torch.randn(trial.means.shape, generator=draw) for _ in range(2))
    window = replace(trial.rollout.window, means=trial.means + fault + 0.1 * rounding)
    fit = replace(trial, rollout=replace(trial.rollout, window=window)).fit(trial.means + fault)
    assert fit.factor == pytest.approx(1, abs=0.05)
    assert fit.by_rounding == pytest.approx((1 + 0.1**2) / 2, rel=0.1)


def test_samples_with_a_gap_are_told_from_those_without(small_run):
    trial = run_trials(*_parts(small_run())).base
    means = trial.engine_means.clone()
    means[2] += 0.1
    odd = replace(trial, given_scores=replace(trial.scores, means=means))
    assert odd.samples_off() == [2]
    assert odd.select(torch.tensor([0])).fit(means[:1] + 1).share == 0  # of no gap


def _parts(run):
    return run.actor, run.engine, run.conditioning
