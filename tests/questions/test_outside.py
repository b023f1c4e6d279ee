"""Legs outside the window: their steps by sample, and how far a repetition arrives from the rollout's own latents."""

from dataclasses import replace

import pytest
import torch

from flowcorr.questions.compared import Compared
from flowcorr.questions.outside import errors_by_leg, legs, repeat_outside

NUM_STEPS = 6
SHAPE = (2, 3)


def rollout_of_ones(indices):
    """The legs of samples whose latents grow by 1 with each step of the schedule."""
    indices = torch.tensor(indices)
    before = indices.double()[..., None, None].expand(*indices.shape, *SHAPE)
    start, final = (
        torch.zeros(len(indices), *SHAPE).double(),
        torch.full((len(indices), *SHAPE), 6.0).double(),
    )
    return list(legs(start, before, before + 1, final, indices, NUM_STEPS))


def one_more(index, latents, rows):
    assert bool((latents == index).all())  # the step that belongs to these latents
    return latents + 1


def test_each_sample_takes_the_steps_outside_its_own_window():
    found = rollout_of_ones([[1, 3], [0, 1]])
    assert [leg.name for leg in found] == ["before", "between", "after"]
    assert [(leg.first.tolist(), leg.stop.tolist()) for leg in found] == [
        ([0, 0], [1, 0]),
        ([2, 1], [3, 1]),
        ([4, 2], [6, 6]),
    ]
    taken = [
        {0: [1, 0]},
        {2: [1, 0]},
        {2: [0, 1], 3: [0, 1], 4: [1, 1], 5: [1, 1]},
    ]
    for leg, steps in zip(found, taken, strict=True):
        arrived, moves = leg.walk(one_more)
        assert torch.equal(arrived, leg.end)
        assert {index: move.flatten(1)[:, 0].tolist() for index, move in moves.items()} == steps


def test_a_rollout_without_final_latents_has_no_leg_after_its_window():
    whole = rollout_of_ones([[2]])[0]
    begin = whole.begin
    found = legs(begin, begin[:, None], begin[:, None], None, torch.tensor([[2]]), NUM_STEPS)
    assert [leg.name for leg in found] == ["before"]


def repeated(run, rollout):
    return repeat_outside(Compared(rollout=rollout, actor=run.actor, training_step=1))


@pytest.mark.parametrize("noisy", [None, (0, 4)])
def test_a_healthy_rollout_is_repeated_and_another_end_is_its_gap(make_run, noisy):
    """SDE steps outside the window repeat the noise of their seeds, which is no part of the velocity's way."""
    sampling = {
        "num_inference_steps": 5,
        "sde_window_size": 1,
        "sde_window_range": (2, 3),
        "sde_noise_range": noisy,
    }
    run = make_run(sampling=sampling, rollout={"n": 2})
    rollout = run.sample()
    # All samples at once: every leg has the whole batch in it.
    for leg in repeated(run, rollout):
        assert float(leg.gap.norm() / leg.way.norm()) <= 1e-5
        still = leg.leg.end - leg.way
        moved = float((still - leg.leg.begin).norm())
        assert (moved > 1e-3) == (noisy is not None)
    moved = replace(rollout, final_latents=rollout.final_latents + 0.5)
    *_, after = repeated(run, moved)
    assert after.gap == pytest.approx(torch.full_like(after.gap, 0.5), abs=1e-4)


def test_errors_are_those_of_the_samples_that_have_steps(make_run):
    sampling = {
        "num_inference_steps": 4, "sde_window_size": 1, "sde_window_range": (2, 4), "window_per": "sample"
    }  # fmt: skip
    run = make_run(sampling=sampling)
    rollout = run.sample()
    moved = replace(rollout, final_latents=rollout.final_latents + 0.5)
    errors = errors_by_leg(repeated(run, moved))
    assert list(errors) == ["before", "after"]
    (before, all_rows), (after, rows) = errors.values()
    assert all_rows.tolist() == list(range(rollout.num_samples))
    assert rows.tolist() == (rollout.window.step_indices[:, 0] == 2).nonzero().flatten().tolist()
    assert 0 < len(rows) < rollout.num_samples
    assert bool((before < 1e-5).all())
    assert bool((after > 0.1).all())
