"""The effect of each preset on the terms of training steps, without a model.

A policy gradient is a sum over terms of coefficients, `d loss / d log_prob`, times what the model makes of each
log-prob; a correction changes nothing but the coefficients. Where a preset's are those of no correction, up to a
factor, so is its gradient; how far two gradients lie apart where they are not, the model decides.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Literal

import torch
from torch import Tensor

from flowcorr.algorithm import MeasuredBands
from flowcorr.correction import OFF, PRESETS, RolloutCorrectionConfig
from flowcorr.correction.config import ScaleName
from flowcorr.instruments.audit.replay import LoggedSteps, Replayed, obstacle, replay
from flowcorr.instruments.drawing import PALETTE, Chart
from flowcorr.instruments.finding import Column, Table
from flowcorr.instruments.plots import Curve, Dot, draw_curves, draw_dots
from flowcorr.instruments.setting import Setting
from flowcorr.metrics import Metrics

THIS_RUN = "this run"
# Within both, a preset acts as no correction does: optimizers that normalise a gradient do not see its length.
SAME_COSINE, SAME_TERMS = 0.999, 0.01
_MAX_LINES = len(PALETTE)

Scale = ScaleName | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The effect of a preset on the steps; "uncorrected" is the run's loss without weights and rejection.

    Attributes:
        mean_weight, ess: of the weights that multiply the loss, after batch normalisation; None where none do.
        rejected_terms, rejected_samples: shares; a sample counts if one of its terms is rejected.
        clipped: share of kept terms whose ratio lies outside the loss's range; None where it has none.
        loss: the policy loss, over all terms as `actor/loss` is; a KL to the reference is no part of it.
        cosine: of its coefficients with uncorrected ones, the mean over steps; 0 for a step of which nothing is left,
            and None where all uncorrected ones are 0.
        least_cosine: the smallest over steps.
        relative_norm: of its coefficients to uncorrected ones, over all steps.
        changed_terms: share whose coefficient has another sign than the uncorrected one, where 0 is a sign too.
        cosines: by step; None where all uncorrected ones are 0, and for steps that cannot be replayed.
    """

    mean_weight: float | None
    ess: float | None
    rejected_terms: float
    rejected_samples: float
    clipped: float | None
    loss: float
    cosine: float | None
    least_cosine: float | None
    relative_norm: float | None
    changed_terms: float
    cosines: Sequence[float | None]

    @property
    def same(self) -> bool:
        """Whether it acts as no correction does, up to the length of the gradient."""
        return self.changed_terms <= SAME_TERMS and self.cosine is not None and self.cosine >= SAME_COSINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A preset at one scale.

    Attributes:
        name: the preset's, or `THIS_RUN` for the run's own correction where it is none of the presets.
        mode: `decoupled`, `bypass` or `auto`.
        scale: its `log_ratio_scale`.
        of_run: whether the run trained with it.
        outcome: None where it cannot be replayed.
        reason: why it cannot be replayed on any step.
    """

    name: str
    mode: str
    scale: Scale
    of_run: bool
    outcome: Outcome | None = None
    reason: str = ""

    @property
    def label(self) -> str:
        """Its name, with its scale where that is not the usual one."""
        scale = self.scale if isinstance(self.scale, str) else f"{self.scale:.4g}"
        return self.name if scale == "mean" else f"{self.name}, {scale}"


def replay_presets(parts: Iterable[LoggedSteps], setting: Setting, *, passes: int = 1) -> list[Replay]:
    """Replay all presets on training steps, those nearest to no correction first.

    Args:
        parts: the steps.
        setting: the run's; its correction is tried too, if it is none of the presets.
        passes: how often bands are measured on the steps before the outcome counts, where they stand for a long run.
    """
    corrections = _corrections(setting)
    tallies = [_Tally() for _ in corrections]
    bands = [setting.bands() for _ in corrections]
    for steps in parts:
        uncorrected = replay(
            steps, RolloutCorrectionConfig.from_preset("bypass_ppo_clip") if steps.bypass else OFF
        )
        for correction, tally, measured in zip(corrections, tallies, bands, strict=True):
            resolved = _in_mode(correction, "bypass" if steps.bypass else "decoupled")
            if reason := obstacle(steps, resolved):
                tally.skip(steps, reason)
                continue
            for _ in range(passes if _measures(resolved, measured) else 1):
                found = replay(steps, resolved, measured)
            tally.add(steps, found, uncorrected)
    replays = [_finished(setting, *found) for found in zip(corrections, tallies, strict=True)]
    return sorted(replays, key=_distance)


def _measures(correction: RolloutCorrectionConfig, bands: MeasuredBands) -> bool:
    return correction.mode == "bypass" and correction.needs_batch and not bands.noise


# As a table and charts -----------------------------------------------------------------------------------------


def preset_table(replays: Sequence[Replay]) -> Table:
    """A row for each preset; those that cannot be replayed, and why, stand in the note."""
    found = [(one, one.outcome) for one in replays if one.outcome is not None]
    same = sum(outcome.same for _, outcome in found)
    note = f"of {len(found)}, {same or 'none'} change only the gradient's length, which Adam ignores"
    reasons: dict[str, list[str]] = {}
    for one in replays:
        if one.outcome is None:
            reasons.setdefault(one.reason, []).append(one.label)
    note = "; ".join([note, *(f"{_named(names)} not replayed ({why})" for why, names in reasons.items())])
    return Table(
        name="presets",
        title="Presets beside no correction",
        note=note,
        columns=[
            Column(name="preset", words=True),
            Column(name="weight", show=_number),
            Column(name="ess", heading="ESS", show=_number),
            Column(name="rejected_terms", heading="rejected", show=_share),
            Column(name="rejected_samples", heading="samples", show=_share),
            Column(name="clipped", show=_share),
            Column(name="cosine", show=_number),
            Column(name="least_cosine", heading="lowest", show=_number),
            Column(name="norm", show=_number),
            Column(name="changed_terms", heading="changed", show=_share),
        ],
        rows=[
            (
                _label(one),
                outcome.mean_weight,
                outcome.ess,
                outcome.rejected_terms,
                outcome.rejected_samples,
                outcome.clipped,
                outcome.cosine,
                outcome.least_cosine,
                outcome.relative_norm,
                outcome.changed_terms,
            )
            for one, outcome in found
        ],
        marks=["this" if one.of_run else "idle" if outcome.same else "" for one, outcome in found],
    )


def _named(names: Sequence[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} are"


def preset_charts(replays: Sequence[Replay], steps: Sequence[int]) -> dict[str, Chart]:
    """How far each preset's gradient is from no correction, and how that changes over training steps."""
    shown = [(one, one.outcome) for one in replays if one.outcome is not None]
    if not shown:
        return {}
    least = min(0.0, *(_or_nan(outcome.least_cosine) for _, outcome in shown))
    rows = [
        Dot(
            name=_label(one),
            value=_or_nan(outcome.cosine),
            span=(_or_nan(outcome.least_cosine), _or_nan(outcome.cosine)),
            muted=outcome.same,
        )
        for one, outcome in shown
    ]
    charts = [
        Chart(
            name="presets_direction",
            title="Direction: cosine with no correction",
            caption="dot: mean over steps; line: down to the lowest step; grey: acts as no correction does",
            draw=draw_dots,
            data={"rows": rows, "view": (least - 0.04, 1.04)},
            height=34 + 19 * len(shown),
        )
    ]
    curves, names = _curves(shown, steps)
    if curves:
        charts.append(
            Chart(
                name="presets_over_training",
                title="Cosine with no correction over training",
                draw=draw_curves,
                data={"curves": curves},
                caption=f"across: training steps; {names}",
            )
        )
    return {chart.name: chart for chart in charts}


def _curves(shown: Sequence[tuple[Replay, Outcome]], steps: Sequence[int]) -> tuple[list[Curve], str]:
    """The presets that turn the gradient, one of those that turn it alike, by letter; and the letters' names."""
    kinds: dict[tuple[float, ...], tuple[Replay, Outcome]] = {}
    for one, outcome in shown if len(steps) > 1 else ():
        if not outcome.same and any(cosine is not None for cosine in outcome.cosines):
            kinds.setdefault(tuple(round(_or_nan(cosine), 2) for cosine in outcome.cosines), (one, outcome))
    found = list(kinds.values())[:: max(1, math.ceil(len(kinds) / _MAX_LINES))]
    curves, names = [], []
    for mark, colour, (one, outcome) in zip(ascii_uppercase, PALETTE, found, strict=False):
        points = [
            (float(step), cosine, cosine, cosine)
            for step, cosine in zip(steps, outcome.cosines, strict=True)
            if cosine is not None
        ]
        curves.append(Curve(mark=mark, colour=colour, band=points))
        names.append(f"{mark}: {_label(one)}")
    return curves, "; ".join(names)


def _label(one: Replay) -> str:
    return f"{one.label} (this run)" if one.of_run and one.name != THIS_RUN else one.label


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.1e}"


def _share(value: float) -> str:
    return f"{value:.1%}"


# What is replayed --------------------------------------------------------------------------------------------


def _corrections(setting: Setting) -> list[RolloutCorrectionConfig]:
    """All presets, and the run's own correction if it is none of them."""
    found, own = [RolloutCorrectionConfig.from_preset(name) for name in PRESETS], setting.correction
    if own.mode != "off" and own not in found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a scale that has nothing to act on
            found.append(replace(own, preset=None))
    return found


def _in_mode(
    correction: RolloutCorrectionConfig, mode: Literal["decoupled", "bypass"]
) -> RolloutCorrectionConfig:
    """The correction with `mode` in place of `auto`."""
    if correction.mode != "auto":
        return correction
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return correction.in_mode(mode)


# Comparing -----------------------------------------------------------------------------------------------------


class _Tally:
    """Sums that make an `Outcome`, chunk by chunk."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.sums: dict[str, float] = {}
        # By step, [., 3]: coefficients times uncorrected ones, and both squared.
        self.products: list[Tensor] = []
        self.reason = ""

    def skip(self, steps: LoggedSteps, reason: str) -> None:
        self.reason = reason
        self.products.append(torch.zeros(len(steps.sizes), 3, dtype=torch.float64))

    def add(self, steps: LoggedSteps, replayed: Replayed, uncorrected: Replayed) -> None:
        ours, theirs = replayed.coefficients, uncorrected.coefficients
        pairs = ((ours, theirs), (ours, ours), (theirs, theirs))
        self.products.append(torch.stack([steps.sums(one * other) for one, other in pairs], dim=1))
        self.metrics = self.metrics.merge(replayed.metrics).on_host()
        sums = {
            **replayed.corrected.counts(),
            "changed_terms": int((ours.sign() != theirs.sign()).sum()),
            "loss": replayed.loss_sum,
            "count": replayed.count,
            **replayed.weights,
        }
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in sums.items()}

    def outcome(self, *, weighted: bool) -> Outcome:
        values, sums = self.metrics.compute(), self.sums
        weights, squares = sums.get("weights", 0.0), sums.get("squared_weights", 0.0)
        products = torch.cat(self.products)
        dots, ours, theirs = products.unbind(1)
        found = theirs > 0
        cosines = torch.where(ours > 0, dots / (ours * theirs).sqrt(), 0.0).clamp(-1, 1)

        return Outcome(
            mean_weight=weights / sums["weighted_terms"] if weighted else None,
            ess=weights**2 / (sums["weighted_terms"] * squares) if weighted and squares else None,
            rejected_terms=sums["rejected_terms"] / sums["terms"],
            rejected_samples=sums["rejected_samples"] / sums["samples"],
            clipped=values.get("actor/pg_clipfrac"),
            loss=sums["loss"] / max(sums["count"], 1.0),
            cosine=float(cosines[found].mean()) if found.any() else None,
            least_cosine=float(cosines[found].min()) if found.any() else None,
            relative_norm=math.sqrt(float(ours.sum() / theirs.sum())) if found.any() else None,
            changed_terms=sums["changed_terms"] / sums["terms"],
            cosines=[value if there else None for value, there in zip(cosines.tolist(), found, strict=True)],
        )


def _finished(setting: Setting, correction: RolloutCorrectionConfig, tally: _Tally) -> Replay:
    outcome, reason = None, tally.reason
    if tally.sums:
        outcome, reason = tally.outcome(weighted=correction.applies_weights), ""
        if not math.isfinite(outcome.loss):
            outcome, reason = None, "its loss is not finite on these terms"
    name = correction.preset
    return Replay(
        name=THIS_RUN if name is None else name,
        mode=correction.mode,
        scale=correction.log_ratio_scale,
        of_run=correction == setting.correction,
        outcome=outcome,
        reason=reason,
    )


def _distance(replay: Replay) -> tuple[float, ...]:
    """How far it is from no correction, for sorting; what cannot be replayed comes last."""
    outcome = replay.outcome
    if outcome is None:
        return (math.inf,)
    cosine = -1.0 if outcome.cosine is None else outcome.cosine
    return 1 - round(cosine, 4), round(outcome.changed_terms, 3)
