"""The drift beside the gradient: by hand, in parts, and as a training step logs and dumps it."""

from dataclasses import replace

import pytest
import torch

from flowcorr.algorithm import drift_squares
from flowcorr.algorithm.score_drift import ScoreDrift, score_drift
from flowcorr.metrics import Metrics
from flowcorr.records import Terms

GROUPS, STEPS = torch.tensor([7, 7, 9, 9]), torch.tensor([[2], [2], [3], [3]])
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -1.0])
# One element. Group 7 shares its gap, so that advantages of mean 0 cancel it; group 9: (2 - 1) .5 / .5 = 1 beside
# signals of 2 + 2 = 4 and 4 + 2 = 6.
PLACES = {
    "next_latents": torch.tensor([1.5, -0.5, 2.0, 0.0]).view(4, 1, 1),
    "rollout_means": torch.tensor([0.5, 0.5, 1.0, 1.0]).view(4, 1, 1),
    "means": torch.tensor([0.25, 0.25, 0.5, 0.5]).view(4, 1, 1),
    "stds": torch.full((4, 1), 0.5),
}


def terms_with(squares, steps=STEPS):
    drift, gradient = squares
    flat = torch.zeros(steps.shape)
    return Terms(
        log_prob=flat,
        old_log_prob=flat,
        rollout_log_prob=flat,
        advantage=flat,
        std=flat,
        step=flat,
        step_index=steps,
        drift_square=drift,
        gradient_square=gradient,
    )


def measured(num_steps=None, **changes):
    squares = drift_squares(ADVANTAGES, GROUPS, STEPS, **{**PLACES, **changes})
    return Metrics(score_drift(terms_with(squares), num_steps)).compute()


def test_equal_states_cancel_the_drift_of_advantages_of_mean_0():
    assert measured(num_steps=5) == {
        "rollout_corr/score_drift": pytest.approx(1 / (16 + 36)),
        "rollout_corr/step_2/score_drift": 0.0,
        "rollout_corr/step_3/score_drift": pytest.approx(1 / 36),
    }


def test_a_rejected_term_breaks_the_balance_of_its_group():
    found = measured(keep=torch.tensor([[True], [False], [True], [True]]))
    assert found["rollout_corr/step_2/score_drift"] == pytest.approx(0.5**2 / 2**2)
    assert found["rollout_corr/step_3/score_drift"] == pytest.approx(1 / 36)


def test_a_mean_that_is_not_finite_leaves_its_term_out():
    means = PLACES["means"].clone()
    means[2] = torch.nan
    assert measured(means=means)["rollout_corr/step_3/score_drift"] == pytest.approx(1 / 4)


def test_parts_add_up_to_the_whole():
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    samples, steps = 12, 3
    groups = torch.arange(samples) // 4 * 1_000_003
    indices = torch.stack([torch.randperm(6, generator=draw)[:steps] for _ in range(samples)])
    advantages, means = normal(samples), normal(samples, steps, 2, 4)
    places = {
        "next_latents": normal(samples, steps, 2, 4),
        "rollout_means": means + 0.1 * normal(*means.shape),
    }
    places |= {"means": means, "stds": 0.1 + normal(samples, steps).abs()}
    whole = drift_squares(advantages, groups, indices, **places)

    drift, order = ScoreDrift(groups, indices), torch.randperm(samples, generator=draw)
    for rows in order.split(5):
        for t in range(steps):  # as where each step has its own backward pass
            part = {name: value[rows, t : t + 1] for name, value in places.items()}
            drift.add(groups[rows], indices[rows, t : t + 1], advantages[rows], **part)
    parts = drift.squares()
    for place in range(2):
        joined = torch.cat([torch.cat([one[place] for one in parts[i : i + 3]], 1) for i in (0, 3, 6)])
        torch.testing.assert_close(joined, whole[place][order])

    # By the definition, of one group and step.
    at = (groups[:, None] == groups[5]) & (indices == indices[5, 1])
    vectors = advantages[:, None, None, None] / places["stds"][..., None, None]
    sums = ((places["rollout_means"] - means) * vectors)[at].sum(0)
    assert (whole[0] * at).sum() == pytest.approx(sums.square().sum().item())


def test_without_squares_nothing_is_measured():
    terms = terms_with((torch.ones(4, 1), torch.ones(4, 1)))
    assert Metrics(score_drift(terms)).compute()["rollout_corr/score_drift"] == 1.0
    assert Metrics(score_drift(replace(terms, drift_square=None))).compute() == {}
    unknown = torch.full((4, 1), torch.nan)
    assert Metrics(score_drift(replace(terms, drift_square=unknown, gradient_square=unknown))).compute() == {}
