"""Replays presets on training steps and compares them with no correction: a table, and charts of their cosines.

A preset that only rescales the coefficients only rescales the gradient. Otherwise the angle between the gradients
depends on the model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_uppercase

import torch
from torch import Tensor

from flowcorr.correction import OFF, PRESETS, RolloutCorrectionConfig
from flowcorr.instruments.audit.effect import Effect, Steps, effect, obstacle
from flowcorr.instruments.drawing import PALETTE, Chart
from flowcorr.instruments.outcome import Column, Table
from flowcorr.instruments.plots import Curve, draw_curves, draw_heat_map
from flowcorr.instruments.thinning import MAX_POINTS, spread_out
from flowcorr.metrics import Metrics

THIS_RUN = "this run"
# Within both, a preset acts as no correction does: optimizers that normalise a gradient do not see its length.
SAME_COSINE, SAME_TERMS = 0.999, 0.01
_MAX_LINES = len(PALETTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A correction on all steps, compared with no correction: the run's loss without weights and rejection.

    Attributes:
        name: the preset's, or `THIS_RUN` for the run's own correction where it is none of the presets; with its
            `log_ratio_scale` where that is not the usual one.
        of_run: whether the run trained with it.
        numbers: by name, those of `_numbers`; empty where it cannot be replayed.
        cosines: of its coefficients with those of no correction, by training step; without those whose uncorrected
            ones are all 0, and those that cannot be replayed.
        reason: why it cannot be replayed on any step.
    """

    name: str
    of_run: bool
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    cosines: Mapping[int, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def label(self) -> str:
        """Its name, marked if the run trained with it."""
        return f"{self.name} (this run)" if self.of_run and not self.name.startswith(THIS_RUN) else self.name

    @property
    def same(self) -> bool:
        """Whether it acts as no correction does, up to the length of the gradient."""
        cosine, changed = self.numbers["cosine"], self.numbers["changed_terms"]
        return cosine is not None and changed is not None and cosine >= SAME_COSINE and changed <= SAME_TERMS


def compare(steps: Sequence[Steps], own: RolloutCorrectionConfig, *, warm_up: int = 0) -> list[Preset]:
    """Replay all presets on training steps, sorted by their distance from no correction.

    Args:
        steps: of the run, in order.
        own: the run's correction, which is tried too if it is none of the presets.
        warm_up: how often bands are measured on the steps before the effect counts, where they stand for a long run.
    """
    corrections = [RolloutCorrectionConfig.from_preset(name) for name in PRESETS]
    if own.mode != "off" and own not in corrections:
        with warnings.catch_warnings(
            action="ignore", category=UserWarning
        ):  # of a scale with nothing to act on
            corrections.append(replace(own, preset=None))
    bypass = RolloutCorrectionConfig.from_preset("bypass_ppo_clip")
    plain = [effect(part, bypass if part.bypass else OFF) for part in steps]
    tried = [
        _tried(steps, plain, correction, of_run=correction == own, warm_up=warm_up)
        for correction in corrections
    ]
    return sorted(tried, key=_distance)


def _tried(
    steps: Sequence[Steps],
    plain: Sequence[Effect],
    correction: RolloutCorrectionConfig,
    *,
    of_run: bool,
    warm_up: int,
) -> Preset:
    effects: list[Effect] = []
    beside: list[Effect] = []
    products, bands, reason = [], steps[0].setting.bands(), ""
    for part, uncorrected in zip(steps, plain, strict=True):
        chosen = _in_mode(correction, bypass=part.bypass)
        if why := obstacle(part, chosen):
            reason = why
            products.append(torch.zeros(3, len(part.sizes), dtype=torch.float64))
            continue
        if chosen.mode == "bypass" and chosen.needs_batch and not effects:
            for _ in range(warm_up):
                effect(part, chosen, bands)
        effects.append(effect(part, chosen, bands))
        beside.append(uncorrected)
        ours, theirs = effects[-1].coefficients, uncorrected.coefficients
        products.append(torch.stack([part.sums(each) for each in (ours * theirs, ours**2, theirs**2)]))
    name = _named(correction)
    if not effects:
        return Preset(name=name, of_run=of_run, reason=reason)
    if not all(math.isfinite(one.loss_sum) for one in effects):
        return Preset(name=name, of_run=of_run, reason="its loss is not finite on these terms")
    dots, ours, theirs = torch.cat(products, dim=1)
    cosines = torch.where(ours > 0, dots / (ours * theirs).sqrt(), 0.0).clamp(-1, 1)
    known = theirs > 0
    numbers = _numbers(effects, beside, weighted=correction.applies_weights)
    if known.any():
        numbers |= {
            "cosine": float(cosines[known].mean()),
            "least_cosine": float(cosines[known].min()),
            "norm": math.sqrt(float(ours.sum() / theirs.sum())),
        }
    numbered = (step for part in steps for step in part.sizes)
    each = zip(numbered, cosines.tolist(), known.tolist(), strict=True)
    return Preset(
        name=name,
        of_run=of_run,
        numbers=numbers,
        cosines={step: cosine for step, cosine, there in each if there},
    )


def _named(correction: RolloutCorrectionConfig) -> str:
    scale = correction.log_ratio_scale
    scale_text = scale if isinstance(scale, str) else f"{scale:.4g}"
    return (correction.preset or THIS_RUN) + ("" if scale_text == "mean" else f", {scale_text}")


def _in_mode(correction: RolloutCorrectionConfig, *, bypass: bool) -> RolloutCorrectionConfig:
    """The correction with the mode of some steps in place of `auto`."""
    if correction.mode != "auto":
        return correction
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return correction.in_mode("bypass" if bypass else "decoupled")


def _numbers(
    effects: Sequence[Effect], plain: Sequence[Effect], *, weighted: bool
) -> dict[str, float | None]:
    """The numbers of a preset over all steps; None for an unknown one.

    `weight` and `ess` are of the weights that multiply the loss, after batch normalisation. A sample is rejected if one
    of its terms is. `clipped` is the share of kept terms whose ratio lies outside the loss's range. `loss` is over all
    terms, as `actor/loss` is; a KL to the reference is no part of it. `cosine` is the mean over steps of that with the
    coefficients of no correction, 0 for a step of which nothing is left; `least_cosine` the smallest, `norm` the length
    beside theirs, and `changed_terms` the share with another sign, where 0 is a sign too.
    """
    judged, kept = (torch.cat([getattr(one, name) for one in effects]) for name in ("judged", "kept"))
    ours, theirs = (torch.cat([one.coefficients for one in ones]).sign() for ones in (effects, plain))
    weight = _finite([one.weight for one in effects if one.weight is not None]) if weighted else None
    rejected = judged & ~kept
    total = float(weight.square().sum()) if weight is not None else 0.0
    return {
        "weight": None if weight is None else float(weight.mean()),
        "ess": float(weight.sum() ** 2 / (len(weight) * total)) if weight is not None and total else None,
        "rejected_terms": int(rejected.sum()) / int(judged.sum()),
        "rejected_samples": int(rejected.any(1).sum()) / int(judged.any(1).sum()),
        "clipped": Metrics(*(one.metrics for one in effects)).compute().get("actor/pg_clipfrac"),
        "cosine": None,
        "least_cosine": None,
        "norm": None,
        "changed_terms": int((ours != theirs).sum()) / int(judged.sum()),
        "loss": sum(one.loss_sum for one in effects) / max(sum(one.count for one in effects), 1.0),
    }


def _finite(parts: Sequence[Tensor]) -> Tensor:
    every = torch.cat([part.flatten() for part in parts])
    return every[every.isfinite()]


def _distance(preset: Preset) -> tuple[float, ...]:
    """How far it is from no correction, for sorting; one that cannot be replayed comes last."""
    if not preset.numbers:
        return (math.inf,)
    cosine, changed = preset.numbers["cosine"], preset.numbers["changed_terms"]
    assert changed is not None, "a share of terms is always known"
    return 1 - round(-1.0 if cosine is None else cosine, 4), round(changed, 3)


# As a table and charts -----------------------------------------------------------------------------------------


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.1e}"


def _share(value: float) -> str:
    return f"{value:.1%}"


_COLUMNS = (
    Column(name="weight", show=_number),
    Column(name="ess", heading="ESS", show=_number),
    Column(name="rejected_terms", heading="rejected", show=_share),
    Column(name="rejected_samples", heading="samples", show=_share),
    Column(name="clipped", show=_share),
    Column(name="cosine", show=_number),
    Column(name="least_cosine", heading="lowest", show=_number),
    Column(name="norm", show=_number),
    Column(name="changed_terms", heading="changed", show=_share),
)


def preset_table(presets: Sequence[Preset]) -> Table:
    """A row for each preset; the note names presets that cannot be replayed, with the reason."""
    replayed = [one for one in presets if one.numbers]
    same = sum(one.same for one in replayed)
    note = f"of {len(replayed)}, {same or 'none'} change only the gradient's length, which Adam ignores"
    reasons: dict[str, list[str]] = {}
    for one in presets:
        if one.reason:
            reasons.setdefault(one.reason, []).append(one.name)
    note = "; ".join([note, *(f"{_counted(names)} not replayed ({why})" for why, names in reasons.items())])
    return Table(
        name="presets",
        title="Presets beside no correction",
        note=note,
        columns=[Column(name="preset", words=True), *_COLUMNS],
        rows=[(one.label, *(one.numbers[column.name] for column in _COLUMNS)) for one in replayed],
        marks=["this" if one.of_run else "idle" if one.same else "" for one in replayed],
    )


def _counted(names: Sequence[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} are"


def preset_charts(presets: Sequence[Preset]) -> dict[str, Chart]:
    """How far each preset's gradient is from no correction, and how that changes over training steps."""
    replayed = [one for one in presets if one.numbers]
    if not any(one.cosines for one in replayed):
        return {}
    columns = spread_out(sorted({step for one in replayed for step in one.cosines}), MAX_POINTS)
    turns = {
        (one.label, step): 1 - one.cosines[step]
        for one in replayed
        for step in columns
        if step in one.cosines
    }
    charts = [
        Chart(
            name="presets_direction",
            title="Direction: 1 - cosine with no correction",
            caption=f"across: training steps; grey: below {1 - SAME_COSINE:.3g}, the direction of no correction",
            draw=draw_heat_map,
            data={
                "rows": [one.label for one in replayed],
                "columns": columns,
                "cells": turns,
                "scale": (1 - SAME_COSINE, max(turns.values())),
            },
            height=34 + 19 * len(replayed),
        )
    ]
    curves, names = _curves(replayed)
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


def _curves(replayed: Sequence[Preset]) -> tuple[list[Curve], str]:
    """Curves by letter of the presets that turn the gradient, one for each distinct curve; and the letters' names."""
    kinds: dict[tuple[tuple[int, float], ...], Preset] = {}
    for one in replayed:
        if not one.same and len(one.cosines) > 1:
            kinds.setdefault(tuple((step, round(cosine, 2)) for step, cosine in one.cosines.items()), one)
    turned = list(kinds.values())[:: max(1, math.ceil(len(kinds) / _MAX_LINES))]
    curves, names = [], []
    for mark, colour, one in zip(ascii_uppercase, PALETTE, turned, strict=False):
        curves.append(Curve.line(mark, colour, one.cosines.items()))
        names.append(f"{mark}: {one.label}")
    return curves, "; ".join(names)
