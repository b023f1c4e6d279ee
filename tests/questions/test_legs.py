"""Legs between the steps of a window: their steps by sample, and how far a repetition arrives from their ends."""

import torch

from flowcorr.questions.legs import errors_by_leg, legs, repeat

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


def test_an_error_is_a_share_of_the_way_without_what_a_step_moves_by_itself():
    found = rollout_of_ones([[1, 3], [0, 1]])
    again = repeat(
        found, lambda index, latents, rows: latents + 1.25, lambda index, latents, rows: latents + 0.5
    )
    (before, rows), (between, one), (after, all_rows) = errors_by_leg(again).values()
    assert (rows.tolist(), one.tolist(), all_rows.tolist()) == ([0], [0], [0, 1])
    for errors in (before, between, after):
        torch.testing.assert_close(errors, torch.full_like(errors, 0.25 / 0.5))


def test_latents_that_differ_without_a_step_between_them_are_broken():
    moved = torch.zeros(2, 2, *SHAPE).double()
    moved[1, 1] = 0.1  # before the second step of the second sample, which follows its first one
    indices = torch.tensor([[1, 3], [0, 1]])
    before = indices.double()[..., None, None].expand(*indices.shape, *SHAPE)
    start = torch.zeros(2, *SHAPE).double()
    for offset, expected in ((0 * moved, [False, False]), (moved, [False, True])):
        found = legs(start, before + offset, before + 1, None, indices, NUM_STEPS)
        assert torch.stack([leg.broken for leg in found]).any(0).tolist() == expected
