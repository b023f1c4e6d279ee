"""Signed residuals: a mean that stays honest under repeated looks, and the size of a fault in it."""

import math

import pytest
import torch

from flowcorr.metrics import Metrics
from flowcorr.questions.residual_terms import (
    ALPHA,
    PREFIX,
    UNSEEN,
    Residuals,
    in_common,
    radius,
    share,
    terms,
)

NAME = "step_noise"


def watched(steps):
    """What is known of `NAME` after each of some steps of terms."""
    residuals = Residuals()
    return [Metrics(residuals.observe(Metrics(terms(NAME, step)))).compute() for step in steps]


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("group", [1, 8])
def test_the_mean_of_rounding_leaves_its_confidence_sequence_as_rarely_as_promised(group):
    """2,000 runs of 320 terms, looked at after every `group`: normal numbers, and a mixture of them."""
    alpha, runs, length = 0.05, 2000, 320
    for values in (draws(runs, length), draws(runs, length) * draws(runs, length, seed=1).abs()):
        ever = torch.zeros(runs, dtype=torch.bool)
        for count in range(group, length + 1, group):
            seen = values[:, :count]
            std = seen.std(1) if count > 1 else torch.zeros(runs)
            ever |= seen.mean(1).abs() > radius(count, std, alpha)
        assert ever.double().mean() < alpha + 3 * math.sqrt(alpha / runs)


def test_it_shrinks_as_the_root_of_the_number_of_terms_and_finds_a_fault_of_a_tenth_of_their_spread():
    assert float(radius(10_000, torch.ones(1), ALPHA)) < 0.06
    noise = draws(2000)
    clean, faulty = watched(noise.split(8)), watched((noise + 0.2).split(8))
    assert {record[PREFIX + NAME] for record in clean} == {0.0}
    assert clean[-1][PREFIX + NAME + UNSEEN] < 0.16
    assert 0 < faulty[-1][PREFIX + NAME] < 0.2 < faulty[-1][PREFIX + NAME + UNSEEN]


def test_too_few_terms_say_nothing():
    assert watched([torch.tensor([0.01])]) == [{PREFIX + NAME: 0.0}]
    assert watched([torch.tensor([0.01, 0.01, 0.01])])[0] == {PREFIX + NAME: 0.0}
    assert terms(NAME, torch.tensor([math.nan])) == {}


def test_equal_terms_leave_no_doubt():
    assert watched([torch.full((4,), 0.01)])[0][PREFIX + NAME] == pytest.approx(0.01)


def test_the_worst_channel_counts():
    values = 0.01 * draws(64, 3)
    values[:, 1] += 1
    assert watched([values])[0][PREFIX + NAME] == pytest.approx(1, abs=0.02)


def test_terms_of_ranks_and_steps_add_up_and_a_resumed_run_goes_on():
    values = draws(40, 2) + 1
    whole, resumed = Residuals(), Residuals()
    whole.observe(Metrics(terms(NAME, values[:8])))
    resumed.restore(whole.state())
    expected = Metrics(whole.observe(Metrics(terms(NAME, values[8:])))).compute()
    ranks = Metrics(terms(NAME, values[8:20]), terms("image_level", values[:0]), terms(NAME, values[20:]))
    assert Metrics(resumed.observe(ranks)).compute() == pytest.approx(expected)
    assert watched([values])[0] == pytest.approx(expected)


def test_shares():
    direction = draws(3, 4, 5)
    assert torch.allclose(share(0.1 * direction, direction), torch.full((3,), 0.1, dtype=torch.float64))


def test_a_part_that_all_have_in_common():
    rows = draws(400, 256) / 16  # of length 1
    assert abs(in_common(rows).mean()) < 0.01
    common = draws(256, seed=1)
    shifted = rows + 0.3 * common / common.norm()
    assert in_common(shifted).mean() == pytest.approx(0.09, abs=0.01)
    assert in_common(rows[:1]).shape == in_common(rows[:0]).shape == (0,)
