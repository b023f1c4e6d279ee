"""Rejection modes: a divergence of each step or sample, held against bounds.

With the scaled log-ratio `d`: `k1 = -d`, `k2 = d^2 / 2`, `k3 = exp(d) - 1 - d` (Schulman, "Approximating KL
Divergence", 2020). Bounds of k1 are bounds of the ratio `exp(d) = exp(-k1)`. verl bounds `k1` itself, that is
the reciprocal ratio: the two agree on symmetric bands `[1/u, u]`, and differ on others.

Formulas use methods of tensors only: the configuration reads this table, and a typo in it need not wait for torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flowcorr.correction.exponents import k3
from flowcorr.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from flowcorr.correction.ratios import LogRatios

# A normal term lies beyond 6 robust standard deviations once in 5e8 times.
OUTLIER_Z = 6.0
MAD_TO_STD = 1.4826  # of a median absolute deviation, for a normal distribution
_UPPER = "one upper bound, or auto, or inf, which only measures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The kind of threshold that a mode takes: a band of ratios, or an upper bound of the value.

    Noise of log-ratios is nearly normal, but a divergence of them is not. `length` maps a value to the size of the
    log-ratio that causes it. On this scale bounds are measured (`auto`), and bypass mode adds the movement by learning.

    Attributes:
        threshold: the form of the threshold, in words.
        length: the size of the log-ratio behind a value that is not negative; it increases from 0. None if the value
            is itself a log-ratio with its sign: then a band bounds `exp(-value)` from both sides.
        value: the inverse of `length`.
    """

    threshold: str = _UPPER
    length: Callable[[Tensor], Tensor] | None = None
    value: Callable[[Tensor], Tensor] | None = None

    @property
    def is_band(self) -> bool:
        return self.length is None


def _itself(value: Tensor) -> Tensor:
    return value


def _root(value: Tensor) -> Tensor:
    return value.sqrt()


def _square(length: Tensor) -> Tensor:
    return length.square()


def _log_root(value: Tensor) -> Tensor:
    return value.log1p().sqrt()


def _exp_square(length: Tensor) -> Tensor:
    return length.square().expm1()


RATIO = Bounds(
    threshold="a band of ratios, such as 0.999_1.001 at log_ratio_scale mean, or auto, or inf, which only measures"
)
"""For a log-ratio with its sign, as in k1."""
ABSOLUTE = Bounds(length=_itself, value=_itself)
"""For `|d|`, or a mean or maximum of it."""
SQUARE = Bounds(length=_root, value=_square)
"""For `d^2`, or a sum, mean or maximum of it, as in k2 and the exact KL."""
EXPONENTIAL = Bounds(length=_log_root, value=_exp_square)
"""For a value that is near a square where it is small and grows as `exp(d)` where it is large, as in k3."""
Z_SCORE = Bounds(
    threshold="one upper bound in robust standard deviations, such as 6, or auto",
    length=_itself,
    value=_itself,
)
"""For a number of standard deviations; its `auto` is 6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A rejection mode, one row of `RS_MODES`; a user's own is given as `package.module:name`.

    Attributes:
        level: whether it judges each step, or whole samples.
        value: the divergence, `[B, T]` of steps or `[B]` of samples; 0 for terms that are not valid.
        bounds: the kind of its threshold: `RATIO`, `ABSOLUTE`, `SQUARE`, `EXPONENTIAL`, `Z_SCORE`, or a `Bounds` of
            your own.
        needs: the field of `LogRatios` that `value` reads and that a batch may lack.

    Raises:
        ConfigError: a field is of another kind.
    """

    level: Literal["step", "sample"]
    value: Callable[[LogRatios], Tensor]
    bounds: Bounds
    needs: Literal["step_kl", "z"] | None = None

    def __post_init__(self) -> None:
        for field, kinds in (("level", ("step", "sample")), ("needs", ("step_kl", "z", None))):
            if (given := getattr(self, field)) not in kinds:
                choices = ", ".join(map(repr, kinds))
                raise ConfigError(f"flowcorr.correction.Mode({field}={given!r}): choose from {choices}")
        if not isinstance(self.bounds, Bounds):
            raise ConfigError(
                f"flowcorr.correction.Mode(bounds={self.bounds!r}): take RATIO, ABSOLUTE, SQUARE, EXPONENTIAL or "
                "Z_SCORE of flowcorr.correction.modes; the threshold itself is rollout_rs_threshold"
            )
        if not callable(self.value):
            raise ConfigError(f"flowcorr.correction.Mode(value={self.value!r}): name a function of LogRatios")


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
    "token_k1": Mode(level="step", value=_k1, bounds=RATIO),
    "token_k2": Mode(level="step", value=_k2, bounds=SQUARE),
    "token_k3": Mode(level="step", value=_k3, bounds=EXPONENTIAL),
    "seq_sum_k1": Mode(level="sample", value=lambda ratios: _k1(ratios).sum(1), bounds=RATIO),
    "seq_sum_k2": Mode(level="sample", value=lambda ratios: _k2(ratios).sum(1), bounds=SQUARE),
    "seq_sum_k3": Mode(level="sample", value=lambda ratios: _k3(ratios).sum(1), bounds=EXPONENTIAL),
    "seq_mean_k1": Mode(level="sample", value=lambda ratios: ratios.mean(_k1(ratios)), bounds=RATIO),
    "seq_mean_k2": Mode(level="sample", value=lambda ratios: ratios.mean(_k2(ratios)), bounds=SQUARE),
    "seq_mean_k3": Mode(level="sample", value=lambda ratios: ratios.mean(_k3(ratios)), bounds=EXPONENTIAL),
    "seq_max_k2": Mode(level="sample", value=lambda ratios: _k2(ratios).amax(1), bounds=SQUARE),
    "seq_max_k3": Mode(level="sample", value=lambda ratios: _k3(ratios).amax(1), bounds=EXPONENTIAL),
    "step_kl": Mode(level="step", value=_step_kl, bounds=SQUARE, needs="step_kl"),
    "seq_kl": Mode(
        level="sample", value=lambda ratios: _step_kl(ratios).sum(1), bounds=SQUARE, needs="step_kl"
    ),
    "step_z": Mode(level="step", value=_z, bounds=Z_SCORE, needs="z"),
}
