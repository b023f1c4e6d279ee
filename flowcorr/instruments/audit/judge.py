"""From a gap and its numbers to its report: facts, faults, advice, tables and charts."""

from __future__ import annotations

from collections.abc import Sequence

from flowcorr.health.finding import Finding
from flowcorr.health.setting import clip_text
from flowcorr.instruments.audit.advice import BASIS, NO_ADVICE, advise, mode_of
from flowcorr.instruments.audit.facts import Facts
from flowcorr.instruments.audit.presets import Preset, preset_charts, preset_table
from flowcorr.instruments.audit.tables import gap_chart, scale_table
from flowcorr.instruments.dumped_loss import ratio_limit
from flowcorr.instruments.fault_words import FAULTS
from flowcorr.instruments.gap_table import Gap, step_table
from flowcorr.instruments.outcome import Charts, Fact, Report


def report_of(
    title: str,
    gap: Gap,
    facts: Facts | None,
    *,
    loss_mode: str = "",
    presets: Sequence[Preset] = (),
    beside: Sequence[Fact] = (),
    faults: Sequence[Finding] = (),
    notes: Sequence[Finding] = (),
    of_recipe: bool = True,
) -> Report:
    """Build the report on a gap; without `facts` it has no advice, and no numbers in units of whole steps.

    Args:
        title: what was audited.
        gap: what was measured.
        facts: its numbers, see `Facts.of`.
        loss_mode: the name of the loss, where another stands in for it.
        presets: tried on its training steps.
        beside: facts that were measured beside the gap.
        faults: of the log-probs, which come before any advice.
        notes: what else is to be said.
        of_recipe: see `advise`.
    """
    tables, advice, told = [step_table(gap)], [NO_ADVICE], _of_gap(gap, loss_mode)
    hidden = any(FAULTS[fault.cause].hides_advice for fault in faults)
    if facts is not None:
        tables.append(scale_table(gap.terms))
        advice = advise(facts, of_recipe=of_recipe)
        told += _of_size(facts, advised=not hidden and not facts.unexplained)
    findings = [*faults, *([] if hidden else advice), *notes]
    chart = gap_chart(tables[0], ratio_limit(gap.setting.actor))
    return Report(
        title=title,
        verdict=findings[0].sentence,
        facts=[*told, *beside],
        tables=[*tables, *([preset_table(presets)] if presets else [])],
        charts=[Charts(title="The gap, and presets", pictures={chart.name: chart} | preset_charts(presets))],
        findings=findings,
    )


def _of_gap(gap: Gap, loss_mode: str) -> list[Fact]:
    """Facts that need no unit of whole steps."""
    (samples, window), size = gap.terms.old_log_prob.shape, gap.terms.num_elements
    limit, outside = ratio_limit(gap.setting.actor), gap.outside()
    now = Gap.of(gap.terms, gap.setting).outside()
    whose = "of their step" if limit is None or outside != now else f"of {clip_text(limit)}"
    named = loss_mode or gap.setting.actor.loss_mode
    counted = f"{samples} samples of {window} SDE step{'s'[: window != 1]}"
    told = f"terms outside the clip range {whose} before any update"
    return [
        Fact(name="num_samples", value=samples, text=counted if size is None else f"{counted}, D = {size}"),
        Fact(name="num_steps", value=window),
        Fact(name="num_elements", value=size),
        Fact(name="loss_mode", value=named, text=f"loss {named}"),
        Fact(name="clip_limit", value=limit),
        Fact(name="outside_clip", value=outside, text="" if outside is None else f"{told}: {outside:.1%}"),
    ]


def _of_size(facts: Facts, *, advised: bool) -> list[Fact]:
    """Facts of a gap in units of whole steps, and the mode that is advised."""
    nats = facts.joint_nats
    facts_of_gap = [
        Fact(name="joint_nats", value=nats, text=f"joint nats of a window, D times its exact KL: {nats:.3g}"),
        Fact(name="outliers", value=facts.outliers),
        Fact(name="outlier_band", value=facts.outlier_band),
    ]
    if advised:
        facts_of_gap += [Fact(name="mode", value=mode_of(facts)), Fact(name="basis", value=BASIS, text=BASIS)]
    return facts_of_gap
