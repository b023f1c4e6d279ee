"""Rejection modes: a divergence of each step or sample, held against bounds.

With the scaled log-ratio `d`: `k1 = -d`, `k2 = d^2 / 2`, `k3 = exp(d) - 1 - d` (Schulman, "Approximating KL
Divergence", 2020). Bounds of k1 are bounds of the ratio `exp(d) = exp(-k1)`. verl bounds `k1` itself, that is
the reciprocal ratio: the two agree on symmetric bands `[1/u, u]`, and differ on others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flowcorr.correction.ratios import LogRatios, k3
from flowcorr.correction.robust import outlier_band
from flowcorr.distributed import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A rejection mode, one row of `RS_MODES`; a user's own is given as `package.module:name`.

    Attributes:
        level: whether it judges each step, or whole samples.
        value: the divergence, `[B, T]` of steps or `[B]` of samples; 0 where a term is not valid.
        bounds: `ratio` bounds `exp(-value)` by a band. The others bound the value from above; they differ in how a
            bound is measured (`auto`): a `square` or an `exponential` of near-normal numbers, or a `z` score.
        needs: the field of `LogRatios` that `value` reads and that a batch may lack.
    """

    level: Literal["step", "sample"]
    value: Callable[[LogRatios], Tensor]
    bounds: Literal["ratio", "square", "exponential", "z"] = "square"
    needs: Literal["step_kl", "z"] | None = None


def _k1(ratios: LogRatios) -> Tensor:
    return -ratios.scaled


def _k2(ratios: LogRatios) -> Tensor:
    return ratios.scaled.square() / 2.0


def _k3(ratios: LogRatios) -> Tensor:
    return k3(ratios.scaled)


def _step_kl(ratios: LogRatios) -> Tensor:
    assert ratios.step_kl is not None
    return ratios.step_kl


def _z(ratios: LogRatios) -> Tensor:
    assert ratios.z is not None
    return ratios.z


RS_MODES: dict[str, Mode] = {
    "token_k1": Mode(level="step", value=_k1, bounds="ratio"),
    "token_k2": Mode(level="step", value=_k2),
    "token_k3": Mode(level="step", value=_k3, bounds="exponential"),
    "seq_sum_k1": Mode(level="sample", value=lambda ratios: _k1(ratios).sum(1), bounds="ratio"),
    "seq_sum_k2": Mode(level="sample", value=lambda ratios: _k2(ratios).sum(1)),
    "seq_sum_k3": Mode(level="sample", value=lambda ratios: _k3(ratios).sum(1), bounds="exponential"),
    "seq_mean_k1": Mode(level="sample", value=lambda ratios: ratios.mean(_k1(ratios)), bounds="ratio"),
    "seq_mean_k2": Mode(level="sample", value=lambda ratios: ratios.mean(_k2(ratios))),
    "seq_mean_k3": Mode(level="sample", value=lambda ratios: ratios.mean(_k3(ratios)), bounds="exponential"),
    "seq_max_k2": Mode(level="sample", value=lambda ratios: _k2(ratios).amax(1)),
    "seq_max_k3": Mode(level="sample", value=lambda ratios: _k3(ratios).amax(1), bounds="exponential"),
    "step_kl": Mode(level="step", value=_step_kl, needs="step_kl"),
    "seq_kl": Mode(level="sample", value=lambda ratios: _step_kl(ratios).sum(1), needs="step_kl"),
    "step_z": Mode(level="step", value=_z, bounds="z", needs="z"),
}


def measured_bounds(
    mode: Mode,
    value: Tensor,
    valid: Tensor,
    *,
    rows: Tensor,
    num_rows: int,
    floor: Tensor,
    group: Group = None,
) -> tuple[float | Tensor, Tensor]:
    """Bounds of a mode's value that the noise of the batch stays within; see `robust.outlier_band`.

    Log-ratios of noise are nearly normal. Their squares, and sums of a few squares, are not, but the cube roots of
    these are: Wilson and Hilferty, "The Distribution of Chi-Square", PNAS 17 (1931). Without the cube root, 96 of 100
    clean batches of 96 terms would have outliers. k3 is close to a square where it is small, and grows as `exp(d)`
    where it is large; `log(1 + k3)` is taken first.

    Args:
        value: its value for each step or sample of the batch.
        valid: `[B, T]` bool, terms that count.
        rows: `[B, T]` int64 in `[0, num_rows)`: steps are compared within their row, samples within the row of their
            first step.
        floor: 0-d, a value that rounding can have.
    """
    if mode.level == "sample":
        valid, rows = valid.any(1), rows[:, 0]
    normal, floor = near_normal(mode, value), near_normal(mode, floor)
    low, high = outlier_band(normal, valid, rows, num_rows, floor=floor, group=group)
    if mode.bounds == "ratio":
        return low, high
    return -math.inf, from_near_normal(mode, high)


def near_normal(mode: Mode, value: Tensor) -> Tensor:
    """A mode's values on the scale on which those of noise are nearly normal, see `measured_bounds`."""
    if mode.bounds == "ratio":
        return value
    if mode.bounds == "exponential":
        value = value.log1p()
    return value.clamp(min=0.0).pow(1 / 3)


def from_near_normal(mode: Mode, normal: Tensor) -> Tensor:
    """The inverse of `near_normal`, never below the value that it came from."""
    if mode.bounds == "ratio":
        return normal
    # A value may be the bound itself, and the cube of its cube root an ulp smaller.
    value = normal.clamp(min=0.0).pow(3) * (1 + 1e-12)
    return value.expm1() if mode.bounds == "exponential" else value
