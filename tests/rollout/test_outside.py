"""Legs outside the window: their steps by sample, and how far a repetition arrives from the rollout's own latents."""

from dataclasses import replace

import pytest
import torch

from flowcorr.models import SamplingPlan
from flowcorr.rollout.outside import legs, repeat_outside

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
    velocity = run.actor.velocity(rollout.sample_conditioning())
    schedule = SamplingPlan.of(run.actor.family, run.config.sampling).schedule
    return repeat_outside(
        rollout, run.config, 1, schedule, lambda latents, timesteps, rows: velocity(latents, timesteps)
    )


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
