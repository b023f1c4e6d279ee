"""The audit of a run's dumped log-probs: without its model, so without the time and the causes of the gap."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from flowcorr import dumps
from flowcorr.diagnostics.audit.gap import delta
from flowcorr.diagnostics.audit.measure import AuditReport, report_of
from flowcorr.diagnostics.diagnosis import diagnose, trained_columns
from flowcorr.diagnostics.dumped import DumpedRun, gap_terms, read_dumped, step_terms
from flowcorr.diagnostics.dumped_files import trained_log_probs
from flowcorr.dumps import DumpedTerms
from flowcorr.errors import ConfigError
from flowcorr.records import Terms

# Standard errors between the two estimates of a step's KL beyond which noise of one size does not explain them.
_DISAGREEMENT = 6.0


def audit_folder(folder: Path, *, allow_imports: Collection[str] = ()) -> AuditReport:
    """Audit the gap between rollout and old policy in all dumped steps of a folder.

    Where exact KLs were not dumped, each step's is estimated from the spread of its log-ratios, see `estimated_kl`.

    Args:
        folder: a run's folder, or one of dumped steps.
        allow_imports: see `read_dumped`.

    Raises:
        ConfigError: no dumped step can be read, or nothing tells the trainer's log-probs.
    """
    run = read_dumped(folder, allow_imports=allow_imports)
    notes = list(run.notes)
    terms = {step: dumps.load(path) for step, path in run.files.items()}
    num_elements = next(filter(None, (one.num_elements for one in terms.values())), None)
    bypass = any(one.bypass for one in terms.values())
    parts = [_gap(run, step, one) for step, one in terms.items()]
    steps = step_terms(run)
    trained, diagnoses = trained_columns(steps), diagnose(steps)
    if not trained.all():
        notes.append(
            f"{int((~trained).sum())} steps of the window have no log-prob of the trainer in any sample: left out"
        )
    gap = Terms.concatenate([part.select((slice(None), trained)) for part in parts])
    gap = gap.select(delta(gap).isfinite().all(1))
    if not len(gap.old_log_prob):
        found = [f"{one.evidence}; {one.remedy}" for one in diagnoses if one.cause == "non_finite"]
        found.append(
            "none was scored before the first update in all of its steps (before_update); dump a run that passes once "
            "over each batch (actor.epochs=1), or one that recomputes old log-probs"
        )
        raise ConfigError(f"{folder} holds no sample whose log-probs are all finite: {found[0]}")
    marks = [one.before_update[:, trained] for one in terms.values() if one.before_update is not None]
    late = sum(int((mark == 0).sum()) for mark in marks)
    if bypass and late:
        notes.append(f"{late} terms were scored after the first update of their step, so they are left out")
    if bypass and not marks:
        notes.append(
            "in bypass mode the gap is of the current policy, so it holds what was learned; dump before_update"
        )
    assert gap.old_rollout_kl is not None, "`_gap` sets it"
    if not gap.old_rollout_kl.isfinite().all():
        gap, told = estimated_kl(gap, num_elements)
        notes += told
    stale = any(diagnosis.cause == "stale" for diagnosis in diagnoses)
    report = report_of(run.config, gap, num_elements, notes=tuple(notes), older_weights=stale)
    return replace(
        report,
        loss_mode=run.loss_mode,
        diagnoses=tuple(diagnoses),
        of_recipe=run.of_flowcorr,
        ages_known=all(one.ages is not None for one in steps),
    )


def estimated_kl(gap: Terms, num_elements: int | None) -> tuple[Terms, list[str]]:
    """The gap with each step's mean KL estimated from its log-ratios, and what is to be said about that.

    For a gap of one size, `delta` is normal with mean `-r^2 / 2` and variance `r^2 / D`, and the KL is `r^2 / 2`: both
    moments tell it, the variance more surely. The larger is taken. Where they disagree the gap is not of one size, and
    the mean is taken, which is the KL of any two densities.
    """
    log_ratio = delta(gap)
    kl = torch.empty_like(log_ratio)
    notes = ["exact KLs were not dumped (old_rollout_kl): estimated from the spread of the log-ratios"]
    for index in gap.step_index.unique().tolist():
        here = gap.step_index == index
        values = log_ratio[here]
        mean = float(values.mean())
        of_spread = 0.0 if num_elements is None else num_elements * float(values.var(correction=0)) / 2
        error = float(values.std(correction=0)) / math.sqrt(len(values)) + of_spread * math.sqrt(
            2 / len(values)
        )
        disagree = num_elements is not None and abs(of_spread + mean) > _DISAGREEMENT * error
        kl[here] = abs(mean) if disagree else max(-mean, of_spread)
        if disagree:
            notes.append(
                f"step {index}: delta log p has mean {mean:.1e}, and noise of its spread would have "
                f"{-of_spread:.1e}: not rounding alone; compare sigmas, timesteps and num_elements of both stacks"
            )
    return replace(gap, old_rollout_kl=kl), notes


def _gap(run: DumpedRun, step: int, dumped: DumpedTerms) -> Terms:
    if dumped.bypass and dumped.current_log_probs is None:
        raise ConfigError(
            f"{run.files[step]} holds the rollout's log-probs alone; dump the trainer's as well: old_log_probs where "
            "it recomputes them, or current_log_probs"
        )
    terms = gap_terms(dumped, run.levels, run.scored)
    target = trained_log_probs(dumped)
    kl = terms.rollout_kl if dumped.bypass else terms.old_rollout_kl
    kl = torch.full_like(target, torch.nan) if kl is None else kl
    if terms.keep is not None:
        target = torch.where(terms.keep, target, torch.nan)
    return replace(
        terms, old_log_prob=target, old_kl=None, rollout_kl=None, old_rollout_kl=kl.double(), keep=None
    )
