"""A number that is found from its residuals, and the search for candidates that explain a gap."""

import pytest
import torch

from flowcorr.instruments.doctor.candidates import (
    Candidate,
    Number,
    Tried,
    best,
    clearly_best,
    search,
)

POINTS = torch.linspace(0.1, 2.0, 7, dtype=torch.float64)


def fitted(residuals, starts, low, high):
    """The number that leaves the least, where the inputs are the number itself."""
    return Number(inputs=float, starts=starts, low=low, high=high).fitted(residuals)


@pytest.mark.parametrize(
    ("curve", "truth", "starts"),
    [
        (lambda number: number * POINTS, 3.7, (1.0,)),
        (lambda number: (number * POINTS) ** 2, 0.4, (0.1, 1.0)),
        (lambda number: (-POINTS / number).exp(), 2.2, (0.5, 3.0)),
    ],
)
def test_the_number_is_found(curve, truth, starts):
    found = fitted(lambda number: curve(number) - curve(truth), starts, 0.01, 10.0)
    assert found == pytest.approx(truth, rel=1e-5)


def test_it_stays_in_its_range_and_where_nothing_depends_on_it():
    assert fitted(lambda number: number * POINTS - 5 * POINTS, (1.0,), 0.5, 2.0) == 2.0
    assert fitted(lambda number: POINTS, (1.0, 2.0), 0.5, 2.0) == 1.0


def searched(*rows, exact=()):
    """The candidates of a search, whose only inputs are what they leave of a gap of 1; those up to 0.5 explain it."""
    asked = []

    def attempt(candidate):
        asked.append(candidate.message)
        (left,) = candidate.inputs
        return Tried(
            candidate=candidate, score=torch.tensor([left]), left=left, explains=left <= 0.5,
            exact=candidate.message in exact,
        )  # fmt: skip

    return search(rows, attempt, lambda other: torch.tensor([other])), asked


def row(message, left, **options):
    return Candidate(cause=message, message=message, inputs=(left,), **options)


def number(message, left, **options):
    found = Number(inputs=lambda value: value, starts=(left,), low=left, high=1.0)
    return Candidate(cause=message, message=message, number=found, **options)


def names(tried):
    return [one.candidate.message for one in tried]


def test_the_candidate_that_leaves_the_least_is_the_best_and_named_where_others_leave_clearly_more():
    tried, _ = searched(row("far", 0.9), row("near", 0.04), row("nearest", 0.01))
    assert names(tried) == ["nearest", "near", "far"]
    assert best(tried) is tried[0]
    assert clearly_best(tried) is None
    tried, _ = searched(row("near", 0.11), row("nearest", 0.01))
    assert clearly_best(tried) is tried[0]
    tried, _ = searched(row("far", 0.9))
    assert best(tried) is clearly_best(tried) is None


def test_a_fitted_number_has_to_leave_clearly_less_than_a_plain_candidate():
    for left, first in ((0.1, "plain"), (0.01, "fitted")):
        for other in (row("fitted", left, fitted=True), number("fitted", left)):
            tried, _ = searched(other, row("plain", 0.2))
            assert names(tried)[0] == first


def test_a_number_is_looked_for_last_and_only_where_nothing_else_makes_it_needless():
    scale = number("scale", 0.01, about="guidance")
    assert searched(scale, row("off", 0.9, about="guidance"))[1] == ["off", "scale"]
    assert searched(scale, row("off", 0.4, about="guidance"))[1] == ["off"]
    assert searched(scale, row("prompts", 0.4))[1] == ["prompts", "scale"]
    assert searched(scale, row("prompts", 0.4), exact=("prompts",))[1] == ["prompts"]


def test_a_valley_of_its_own_is_left_for_the_next_start():
    """Beside 1 the residual has a smallest size that is not 0, and the best start lies there."""
    found = fitted(
        lambda value: torch.tensor([(value + 2) * ((value - 1) ** 2 + 0.1)], dtype=torch.float64),
        (1.5, -3.0),
        -4.0,
        4.0,
    )
    assert found == pytest.approx(-2, abs=1e-6)
