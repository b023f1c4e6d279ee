"""The steps outside the window, as the training stack takes them again, with the noise of their seeds."""

from dataclasses import replace

import pytest
import torch

from flowcorr.questions.compared import Compared
from flowcorr.questions.legs import errors_by_leg
from flowcorr.questions.outside import repeat_outside


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
