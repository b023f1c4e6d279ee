"""Exponentials of log-ratios: values where a plain `exp` would overflow."""

from __future__ import annotations

import math

import pytest
import torch

from flowcorr.correction.exponents import bounded, k3


def test_an_exponent_is_held_within_20():
    assert bounded(torch.tensor([-25.0, 0.5, 25.0])).tolist() == [-20.0, 0.5, 20.0]


def test_k3_is_linear_where_its_exponential_would_overflow():
    found = k3(torch.tensor([0.0, 20.0, 25.0, -25.0], dtype=torch.float64)).tolist()
    expected = [0.0, math.expm1(20) - 20, math.expm1(20) - 20 + 5, math.expm1(-20) + 20 + 5]
    assert found == pytest.approx(expected)
