"""A number that is found from its residuals."""

import pytest
import torch

from flowcorr.instruments.doctor.fitting import fitted

POINTS = torch.linspace(0.1, 2.0, 7, dtype=torch.float64)


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
