"""From a measured gap to its report: facts, faults, advice, tables and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from flowcorr.instruments.audit.advice import BASIS, Facts, advise, mode_of
from flowcorr.instruments.audit.explained import Beyond
from flowcorr.instruments.audit.gap import joint_nats
from flowcorr.instruments.audit.presets import Preset, preset_charts, preset_table
from flowcorr.instruments.audit.tables import (
    gap_chart,
    outliers,
    scale_table,
    step_table,
)
from flowcorr.instruments.clip_noise import StartRatios, clip_text
from flowcorr.instruments.dumped_loss import ratio_limit
from flowcorr.instruments.fault_words import FAULTS
from flowcorr.instruments.finding import Charts, Fact, Finding, Report
from flowcorr.instruments.setting import Setting
from flowcorr.losses import resolve_loss
from flowcorr.records import Terms

NO_ADVICE = Finding(
    level="note",
    cause="num_elements",
    sentence="no advice: the dump does not tell num_elements, without which a gap has no size",
)
_ASSUMED_NEWEST = Finding(
    level="note",
    cause="ages",
    sentence="the dump does not tell whether these weights were the newest (policy_versions, version)",
    remedy="if they were not, recompute old log-probs (decoupled)",
)


def report_of(
    title: str,
    setting: Setting,
    gap: Terms,
    num_elements: int | None,
    *,
    ratios: StartRatios | None = None,
    loss_mode: str = "",
    presets: Sequence[Preset] = (),
    steps: Sequence[int] = (),
    facts: Sequence[Fact] = (),
    faults: Sequence[Finding] = (),
    notes: Sequence[Finding] = (),
    stale: float = 0.0,
    recompute_share: float | None = None,
    of_recipe: bool = True,
    ages: Mapping[int, Tensor] | None = None,
    beyond: Beyond | None = None,
) -> Report:
    """The report on a gap; without `num_elements` it holds what needs no unit of whole steps, and no advice.

    Args:
        title: what was audited.
        setting: the run's, with which it goes on.
        gap: what was measured.
        num_elements: `D`, where known.
        ratios: of the gap's terms, where the loss or its clip range differs by step; None for those of `setting`.
        loss_mode: the name of the loss, where another stands in for it.
        presets: tried on these terms.
        steps: the training steps that these are of.
        facts: what was measured beside the gap.
        faults: of the log-probs, which come before any advice.
        notes: what else is to be said.
        stale: joint nats of staleness alone, where it was told apart.
        recompute_share: of the recompute pass in the time of a step, where it was timed.
        of_recipe: see `advise`.
        ages: of a dump, by training step the age of the weights that sampled, where it tells that.
        beyond: the step whose gap is farthest beyond what the run's precision explains.
    """
    loss, limit = resolve_loss(setting.actor), ratio_limit(setting.actor)
    ratios = StartRatios.of(gap, setting.actor) if ratios is None else ratios
    by_step, outside = step_table(gap, ratios, num_elements), ratios.outside()
    now = StartRatios.of(gap, setting.actor).outside()
    whose = "of their step" if limit is None or outside != now else f"of {clip_text(limit)}"
    samples, window = gap.old_log_prob.shape
    loss_mode = loss_mode or setting.actor.loss_mode
    size = "" if num_elements is None else f", D = {num_elements}"
    found = [
        Fact(
            name="num_samples",
            value=samples,
            text=f"{samples} samples of {window} SDE step{'s'[: window != 1]}{size}",
        ),
        Fact(name="num_steps", value=window),
        Fact(name="num_elements", value=num_elements),
        Fact(name="loss_mode", value=loss_mode, text=f"loss {loss_mode}"),
        Fact(name="clip_limit", value=limit),
        Fact(
            name="outside_clip",
            value=outside,
            text=""
            if outside is None
            else f"terms outside the clip range {whose} before any update: {outside:.1%}",
        ),
    ]
    hidden = any(FAULTS[fault.cause].hides_advice for fault in faults)
    tables, advice = [by_step], [NO_ADVICE]
    if num_elements is not None:
        nats = joint_nats(gap, num_elements)
        share, band = outliers(gap, num_elements)
        scales = scale_table(gap, num_elements)
        tables.append(scales)
        worth = {(row["scale"], row["level"]): row["expected_ess"] for row in scales.records()}
        needed = {row["step_index"]: row["clip_needed"] for row in by_step.records()}
        if setting.actor.ratio_level != "step":  # the window has one ratio
            needed = dict.fromkeys(needed, max(needed.values()))
        judged = Facts(
            num_steps=window,
            num_elements=num_elements,
            joint_nats=nats,
            exact_ess=worth["sum", "sequence"],
            stale_nats=stale,
            clip_limit=limit,
            clip_by_step=needed,
            window_end=setting.window_end,
            loss_mode=setting.actor.loss_mode,
            limit=loss.limit,
            ratio_level=setting.actor.ratio_level,
            densities=setting.densities,
            outliers=share,
            outlier_band=band,
            recompute_share=recompute_share,
            older_weights=setting.staleness > 0 or any(fault.cause == "stale" for fault in faults),
            quantization=setting.quantization,
            correction=setting.correction,
            beyond=beyond,
        )
        found += [
            Fact(
                name="joint_nats",
                value=nats,
                text=f"joint nats of a window, D times its exact KL: {nats:.3g}",
            ),
            Fact(name="outliers", value=share),
            Fact(name="outlier_band", value=band),
        ]
        if not hidden and not judged.unexplained:
            found += [
                Fact(name="mode", value=mode_of(judged)),
                Fact(name="basis", value=BASIS, text=BASIS),
            ]
        advice = advise(judged, of_recipe=of_recipe)
        if mode_of(judged) == "bypass" and not of_recipe and not ages:
            advice.append(_ASSUMED_NEWEST)
    findings = [*faults, *([] if hidden else advice), *notes]
    pictures = {chart.name: chart for chart in [gap_chart(by_step, limit)]} | preset_charts(presets, steps)
    return Report(
        title=title,
        verdict=findings[0].sentence,
        facts=[*found, *facts],
        tables=[*tables, *([preset_table(presets)] if presets else [])],
        charts=[Charts(title="The gap, and presets", pictures=pictures)],
        findings=findings,
    )
