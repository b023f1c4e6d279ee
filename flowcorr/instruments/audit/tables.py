"""The worth of weights on a gap, its outliers, and its chart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowcorr.correction import compute_rollout_correction_and_rejection_mask
from flowcorr.correction.bounds import SCALES, scale_factor
from flowcorr.correction.exponents import bounded
from flowcorr.correction.modes import OUTLIER_Z
from flowcorr.correction.robust import outlier_band
from flowcorr.health.setting import limit_at
from flowcorr.instruments.drawing import BLUE, INK, LIMIT, Chart
from flowcorr.instruments.faults import delta
from flowcorr.instruments.gap_table import ABS_DELTA, QUANTILES
from flowcorr.instruments.outcome import Column, Table
from flowcorr.instruments.plots import Curve, draw_curves
from flowcorr.records import Terms


def joint_nats(gap: Terms) -> float:
    """Mean over samples of the exact KL of the window, by the chain rule: `D` times its sum over steps."""
    return _size(gap) * float(_exact_kl(gap).sum(1).mean())


def exact_ess(gap: Terms) -> float:
    """The share of samples that exact weights of whole windows would keep, of many samples like these."""
    return _expected_ess(2 * _exact_kl(gap).sum(1), float(_size(gap)), _size(gap))


def scale_table(gap: Terms) -> Table:
    """The worth of weights without a cap at every scale, by the definitions of ESS and chi-squared.

    The measured ESS is too high where few samples were measured; the expected one is for many samples like them.
    """
    rows, size, of_terms, kl = [], _size(gap), delta(gap), _exact_kl(gap)
    levels = {
        "token": (of_terms.flatten(), 2 * kl.flatten()),
        "sequence": (of_terms.sum(1), 2 * kl.sum(1)),
    }
    for scale in SCALES:
        factor = scale_factor(scale, size)
        for level, (log_ratio, squared) in levels.items():
            first, second = _log_mean_exp(factor * log_ratio), _log_mean_exp(2 * factor * log_ratio)
            chi2 = math.expm1(second) if second < 700 else None
            expected = _expected_ess(squared, factor, size)
            rows.append((scale, level, math.exp(2 * first - second), expected, chi2))
    return Table(
        name="scales",
        title="Weights without a cap",
        note="expected: from the exact KLs, for many samples; chi-squared: mean square less 1, so it may be negative, "
        "and - where it overflows",
        columns=[
            Column(name="scale", words=True),
            Column(name="level", words=True),
            Column(name="ess", heading="ESS", show="{:.3f}".format),
            Column(name="expected_ess", heading="ESS expected", show="{:.3f}".format),
            Column(name="chi2", heading="chi-squared", show="{:.2g}".format),
        ],
        rows=rows,
    )


def _expected_ess(squared: Tensor, factor: float, num_elements: int) -> float:
    """The share of weights `exp(factor delta)` that count, of many samples like these.

    With `R` the sum of `r^2` over the steps that a weight is of, its `delta` is normal with mean `-R / 2` and variance
    `R / D`, so that `exp(c delta)` has the moments `exp(-c R / 2 + c^2 R / (2 D))` and `exp(-c R + 2 c^2 R / D)`. Terms
    differ in `R`, by their steps of the schedule above all, so the expected share is of the mixture of them. At scale
    `sum` it is `1 / mean(exp(R D))`, which a few large gaps make far smaller than their mean would.

    Args:
        squared: `[n]`, `R` of each weight.
        factor: `c`.
        num_elements: `D`.
    """
    spread, drift = factor**2 * squared / num_elements, factor * squared
    return math.exp(2 * _log_mean_exp((spread - drift) / 2) - _log_mean_exp(2 * spread - drift))


def _log_mean_exp(values: Tensor) -> float:
    return float(values.logsumexp(0)) - math.log(len(values))


def _exact_kl(gap: Terms) -> Tensor:
    assert gap.old_rollout_kl is not None, "a gap has exact KLs"
    return gap.old_rollout_kl


def _size(gap: Terms) -> int:
    assert gap.num_elements is not None, "a gap without the size of its latents has no unit of whole steps"
    return gap.num_elements


def outliers(gap: Terms) -> tuple[float, float]:
    """The share of terms that `step_z` rejects, and the largest `|ratio - 1|` that is no outlier at any step."""
    log_ratio, size, kept, ends = delta(gap), _size(gap), [], []
    for index in gap.step_index.unique():  # one at a time: torch takes quantiles of 2^24 numbers at most
        here = gap.step_index == index
        values = log_ratio[here]
        rows = torch.zeros_like(values, dtype=torch.int64)
        keep = compute_rollout_correction_and_rejection_mask(
            gap.old_log_prob[here][:, None],
            gap.rollout_log_prob[here][:, None],
            rollout_rs="step_z",
            rollout_rs_threshold=OUTLIER_Z,
            step_indices=rows[:, None],
            num_elements=size,
        ).keep
        low, high = outlier_band(values, torch.ones_like(values), rows, 1, floor=0.01 / size)
        kept.append(keep.flatten())
        ends.append(torch.maximum(-low, high))
    return float((~torch.cat(kept)).double().mean()), float(bounded(torch.stack(ends).amax()).expm1())


def gap_chart(steps: Table, limit: float | Sequence[float] | None) -> Chart:
    """A chart of the gap by step, with the clip range."""
    rows = steps.records()
    low, middle, high = (f"{level:.0%}" for level in QUANTILES)
    least, typical, most = ABS_DELTA
    band = [(row["step_index"], row[typical], row[least], row[most]) for row in rows]
    curves = [
        Curve.line("needed", INK, ((row["step_index"], row["clip_needed"]) for row in rows)),
        Curve(mark=middle, colour=BLUE, band=band),
    ]
    if limit is not None:
        curves.append(Curve.line("clip", LIMIT, ((index, limit_at(limit, index)) for index, *_ in band)))
    return Chart(
        name="audit_gap",
        title="The gap by step of the schedule",
        draw=draw_curves,
        data={"curves": curves, "log": all(row[least] > 0 for row in rows)},
        caption=f"across: step of the schedule; {middle}: quantile of |delta log p|, nats per latent element, with a "
        f"band from {low} to {high}; needed: the clip range that bypass needs"
        + ("; clip: the configured clip range" if limit is not None else ""),
    )
