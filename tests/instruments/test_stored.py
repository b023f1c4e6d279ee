"""Half precision, as values tell it."""

import math

import pytest
import torch

from flowcorr.instruments.stored import rounding_of, stored_in

VALUES = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "found", "rounding"),
    [
        (torch.bfloat16, torch.bfloat16, 2**-6),
        (torch.float16, torch.float16, 2**-9),
        (torch.float32, None, 0.125),
        (torch.float64, None, 0.125),
    ],
)
def test_the_precision_is_that_of_all_values(dtype, found, rounding):
    values = torch.cat([VALUES.to(dtype).double(), torch.tensor([math.nan, math.inf])])
    assert stored_in(values) == found
    assert rounding_of(values, 0.125) == rounding


def test_values_that_are_not_finite_tell_nothing():
    assert stored_in(torch.tensor([math.nan])) is None
