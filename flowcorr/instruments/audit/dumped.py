"""The audit of a run's dumped log-probs, without its model."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from flowcorr import dumps
from flowcorr.correction import OFF
from flowcorr.dumps import DumpedTerms
from flowcorr.errors import ConfigError
from flowcorr.instruments.audit.judge import report_of
from flowcorr.instruments.audit.presets import Replay, replay_presets
from flowcorr.instruments.audit.replay import chunks
from flowcorr.instruments.faults import delta, diagnose, trained_columns
from flowcorr.instruments.finding import Report, on_files
from flowcorr.instruments.step_files import trained_log_probs
from flowcorr.instruments.steps import DumpedRun, ages_of, gap_of, read_dumped
from flowcorr.records import Terms
from flowcorr.trainer.run_config import LOSS, MODES, how_to_allow

# Standard errors between the two estimates of a step's KL beyond which noise of one size does not explain them.
_DISAGREEMENT = 6.0
_FEWEST = 8  # terms of a step: the error of fewer, from their own spread, is too small


def audit_folder(folder: Path, *, allow_imports: Collection[str] = ()) -> Report:
    """Audit the gap between rollout and old policy in all dumped steps of a folder, and replay presets on them.

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
    steps = {step: gap_of(one, run.levels, run.scored) for step, one in terms.items()}
    ages = ages_of(terms)
    trained, faults = trained_columns(list(steps.values())), diagnose(steps, ages)
    marks = [
        (one.before_update == 0) & trained_log_probs(one).isfinite()
        for one in terms.values()
        if one.bypass and one.before_update is not None
    ]
    late = sum(int(mark.sum()) for mark in marks)
    if not trained.all():
        which = " from before the first update" if late else ""
        notes.append(
            f"{int((~trained).sum())} steps of the window have no log-prob of the trainer{which} in any sample: left "
            "out"
        )
    parts = [_exact(run, step, terms[step], gap) for step, gap in steps.items()]
    gap = Terms.concatenate([part.select((slice(None), trained)) for part in parts])
    gap = gap.select(delta(gap).isfinite().all(1))
    if not gap.old_log_prob.numel():  # no sample, or no step of the window
        found = [
            f"{one.sentence} ({one.evidence}); {one.remedy}" for one in faults if one.cause == "non_finite"
        ]
        found.append(
            "none was scored before the first update in all of its steps (before_update); dump a run that passes once "
            "over each batch (actor.epochs=1), or one that recomputes old log-probs"
            if late
            else "none was scored at all steps of the window that any training step scored; score the same steps of "
            "the window in each training step"
        )
        raise ConfigError(f"{folder} holds no sample whose log-probs are all finite: {found[0]}")
    if late:
        notes.append(f"{late} terms were scored after the first update of their step, so they are left out")
    if bypass and not marks:
        notes.append(
            "in bypass mode the gap is of the current policy, so it holds what was learned; dump before_update"
        )
    assert gap.old_rollout_kl is not None, "`_exact` sets it"
    if not gap.old_rollout_kl.isfinite().all():
        gap, told = estimated_kl(gap, num_elements, densities=run.setting.densities)
        notes += told
    if LOSS in run.left_out:
        notes.append(
            f"presets are not replayed: {LOSS}={run.loss_mode!r} is code of the run's own; "
            f"{how_to_allow(run.loss_mode)}"
        )
    return report_of(
        f"Audit of {folder}",
        run.setting,
        gap,
        num_elements,
        loss_mode=run.loss_mode,
        replays=replays_of(run),
        steps=list(run.files),
        faults=faults,
        notes=on_files(notes),
        of_recipe=run.of_flowcorr,
        ages=ages if len(ages) == len(steps) else None,
    )


def replays_of(run: DumpedRun) -> list[Replay]:
    """Presets on the dumped steps; none where the loss is not to be imported."""
    if LOSS in run.left_out:
        return []
    setting = run.setting
    if not run.of_flowcorr or MODES in run.left_out:  # what corrected it is not known, or cannot be replayed
        setting = replace(setting, correction=OFF)
    parts = chunks(list(run.files.values()), run.levels, of_flowcorr=run.of_flowcorr)
    return replay_presets(parts, setting)


def estimated_kl(gap: Terms, num_elements: int | None, *, densities: bool = True) -> tuple[Terms, list[str]]:
    """The gap with each step's mean KL estimated from its log-ratios, and notes on the estimate.

    For a gap of one size, `delta` is normal with mean `-r^2 / 2` and variance `r^2 / D`, and the KL is `r^2 / 2`: both
    moments tell it, the variance more surely. The larger is taken. Where they disagree the gap is not of one size, and
    the mean is taken, which is the KL of any two densities.

    Args:
        gap: with log-probs of both sides.
        num_elements: `D`; None where it is not known.
        densities: whether log-probs are densities; else they are in units of `2 s^2` nats.
    """
    log_ratio = delta(gap) if densities else delta(gap) / (2 * gap.std.double().square())
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
        if disagree and len(values) >= _FEWEST:
            notes.append(
                f"step {index}: delta log p has mean {mean:.1e}, and noise of its spread would have "
                f"{-of_spread:.1e}: not rounding alone; compare sigmas, timesteps and num_elements of both stacks"
            )
    return replace(gap, old_rollout_kl=kl), notes


def _exact(run: DumpedRun, step: int, dumped: DumpedTerms, gap: Terms) -> Terms:
    """The gap with NaN where a term is not judged, and where an exact KL is not known."""
    if dumped.bypass and dumped.current_log_probs is None:
        raise ConfigError(
            f"{run.files[step]} holds the rollout's log-probs alone; dump the trainer's as well: old_log_probs where "
            "it recomputes them, or current_log_probs"
        )
    target, kl = gap.old_log_prob, gap.old_rollout_kl
    kl = torch.full_like(target, torch.nan) if kl is None else kl
    if gap.keep is not None:
        target = torch.where(gap.keep, target, torch.nan)
    return replace(gap, old_log_prob=target, old_rollout_kl=kl.double(), keep=None)
