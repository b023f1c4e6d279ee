"""Exponentials of log-ratios that cannot overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def bounded(exponent: Tensor) -> Tensor:
    """Clamp an exponent to +-20: `exp(20)` is 5e8, so sums and squares of ratios stay finite in float32."""
    return exponent.clamp(-20.0, 20.0)


def k3(delta: Tensor) -> Tensor:
    """`exp(delta) - 1 - delta`, never negative; the exponent is held within +-20, so k3 is linear beyond.

    Source: Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
    """
    # expm1: k3 is about delta^2 / 2, and `exp(delta) - 1 - delta` would lose its digits to cancellation.
    exponent = bounded(delta)
    return exponent.expm1() - exponent + (delta - exponent).abs()
