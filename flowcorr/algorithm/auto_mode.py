"""`bypass_mode: auto`: bypass while the rollout's noise fits into the clip range, decoupled while it does not.

Bypass mode saves the recompute pass, and its ratios start off 1 by the noise of the rollout: rounding, stale weights.
The cost depends on the .99 quantile of `|ratio - 1|`, before anything was learned and with the ratio as the loss uses
it. For a random shift of the step means (`examples/ground_truth`), the gradient's bias is 15 % with that quantile at 2
clip ranges, 2.3 % at 1, and 1.8 % at 1/2, as without a clip. Hence the quantile, and `auto_enter: 1.0` and
`auto_leave: 0.5`.

The quantile costs nothing to measure. In bypass mode it is taken over the terms that are scored before the first
optimizer step, while the current policy still is the old one; in decoupled mode, over the whole batch. Bypass ends when
the lower end of the quantile's 95 % interval is above `auto_enter` clip ranges. It comes back when the upper end is
below `auto_leave`. In between the mode stays, so that noise cannot switch it to and fro.

With stale weights a run begins decoupled: in bypass mode the clip would hold the update to the older weights, which
costs .18 of held-out exact match at four steps of staleness (`examples/mismatch_study`).

The interval comes from order statistics (`noise_quantile`), because the noise is not normal: it mixes the steps of the
schedule and has outliers. It covers the last 16 training steps, because a .99 quantile has an upper end only from 368
terms on, and small batches need several steps for that. Bypass ends soon: 4 of the first 96 terms outside are enough.
It comes back late, when the noisy steps are more than 16 steps old.

The interval assumes independent terms. Terms of one prompt are not quite independent, because they share their steps:
with int4 weights on the embedded model, the number of terms beyond the .99 quantile varies 1.7 times as much as a
binomial number (4 times beyond the .9 quantile, another reason for .99), and the interval covers in 90 % of cases. The
distance between the two thresholds allows for that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from flowcorr.algorithm.noise_floor import Quantile, noise_counts, noise_quantile
from flowcorr.config.schema import Config
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.metrics import Metrics, maximum, mean

logger = logging.getLogger(__name__)

QUANTILE = 0.99
CONFIDENCE = 0.95
WINDOW = 16


class AutoMode:
    """The mode of each training step; a mode that is not `auto` never changes.

    Args:
        configured: `algorithm.rollout_correction`, with any `bypass_mode`.
        stale: whether the engine samples with older weights than the trained ones.

    Attributes:
        correction: the correction of the next training step, decoupled or bypass.
    """

    def __init__(self, configured: RolloutCorrectionConfig, *, stale: bool = False) -> None:
        self.correction = configured
        self._configured = configured if configured.mode == "auto" else None
        self._window: list[Tensor] = []  # counts of noise, one a training step
        if self._configured is not None:
            self.correction = self._configured.in_mode("decoupled" if stale else "bypass")

    @classmethod
    def of(cls, config: Config) -> AutoMode:
        """The mode at the start of a run."""
        return cls(config.algorithm.rollout_correction, stale=config.rollout.max_weight_age > 0)

    def observe(self, metrics: Metrics) -> Metrics:
        """Add the measurements of a training step, and choose the mode of the next step.

        Args:
            metrics: all of the training step's.

        Returns:
            `rollout_corr/bypass`, 1 if that step was in bypass mode, else 0, and `rollout_corr/noise_quantile`, `_low`
            and `_high` over the window, in clip ranges; empty if the configuration fixes the mode.
        """
        configured, correction = self._configured, self.correction
        if configured is None:
            return Metrics()
        self._window = [*self._window, noise_counts(metrics)][-WINDOW:]
        noise = noise_quantile(torch.stack(self._window).sum(0), QUANTILE, CONFIDENCE)
        if correction.mode == "bypass" and noise.low >= configured.auto_enter:
            self._switch(configured, noise, "decoupled")
        elif correction.mode == "decoupled" and noise.high <= configured.auto_leave:
            self._switch(configured, noise, "bypass")
        ends = {"": noise.value, "_low": noise.low, "_high": noise.high}
        quantiles = {
            f"rollout_corr/noise_quantile{end}": maximum(value)
            for end, value in ends.items()
            if math.isfinite(value)  # too few terms bound it
        }
        return Metrics({"rollout_corr/bypass": mean(int(correction.mode == "bypass"), 1), **quantiles})

    def state(self) -> dict[str, Tensor]:
        """The state for a checkpoint; empty if the mode is fixed by the configuration."""
        if self._configured is None:
            return {}
        state = {"bypass": torch.tensor(self.correction.mode == "bypass")}
        return state | ({"window": torch.stack(self._window)} if self._window else {})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state`; a checkpoint of a run without `auto` changes nothing."""
        if self._configured is None or "bypass" not in state:
            return
        self.correction = self._configured.in_mode("bypass" if state["bypass"] else "decoupled")
        self._window = list(state["window"]) if "window" in state else []

    def _switch(
        self, configured: RolloutCorrectionConfig, noise: Quantile, mode: Literal["decoupled", "bypass"]
    ) -> None:
        self.correction = configured.in_mode(mode)
        consequence = (
            f"below auto_leave={configured.auto_leave:g}: the next training step is in bypass mode"
            if mode == "bypass"
            else f"above auto_enter={configured.auto_enter:g}: the next training step is decoupled"
        )
        logger.warning(
            "the %g quantile of |ratio - 1| before any update is %.3g clip ranges (%g %% interval %.3g to %.3g, "
            "%d terms in %d of %d training steps), %s",
            QUANTILE,
            noise.value,
            100 * CONFIDENCE,
            noise.low,
            noise.high,
            noise.count,
            len(self._window),
            WINDOW,
            consequence,
        )
