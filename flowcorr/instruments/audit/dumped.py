"""The audit of a run's dumped log-probs, without its model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from flowcorr.correction import OFF
from flowcorr.dumps import DumpedTerms
from flowcorr.dumps.replay import load_replay, replay_files
from flowcorr.errors import ConfigError
from flowcorr.health.finding import Finding
from flowcorr.health.rule import VELOCITY_DISTANCE
from flowcorr.instruments.audit.effect import steps_of
from flowcorr.instruments.audit.explained import Beyond, Stated, beyond
from flowcorr.instruments.audit.facts import Facts
from flowcorr.instruments.audit.judge import report_of
from flowcorr.instruments.audit.presets import Preset, compare
from flowcorr.instruments.faults import delta, diagnose, trained_columns
from flowcorr.instruments.gap_size import estimated_kl, moments_disagree
from flowcorr.instruments.gap_table import Gap
from flowcorr.instruments.outcome import Report, on_files
from flowcorr.instruments.step_files import trained_log_probs
from flowcorr.instruments.steps import DumpedRun, ages_of, gap_of, read_dumped
from flowcorr.instruments.stored import stored_in
from flowcorr.records import Terms
from flowcorr.trainer.run_config import LOSS, MODES, how_to_allow
from flowcorr.trainer.run_folder import metrics_of


def audit_folder(folder: Path, *, allow_imports: Collection[str] = ()) -> Report:
    """Audit the gap between rollout and old policy in all dumped steps of a folder, and replay presets on them.

    Where exact KLs were not dumped, each step's is estimated from its log-ratios, see `estimated_kl`.

    Args:
        folder: a run's folder, or one of dumped steps.
        allow_imports: see `read_dumped`.

    Raises:
        ConfigError: no dumped step can be read, or nothing tells the trainer's log-probs.
    """
    run = read_dumped(folder, allow_imports=allow_imports)
    terms = _with_trainer(run)
    steps = {step: gap_of(one, run.scored) for step, one in terms.items()}
    ages = ages_of(terms)
    trained, faults = trained_columns(list(steps.values())), diagnose(steps, ages)
    judged = {step: _judged(gap).select((slice(None), trained)) for step, gap in steps.items()}
    finite = {step: delta(gap).isfinite().all(1) for step, gap in judged.items()}
    judged = {step: gap.select(finite[step]) for step, gap in judged.items()}
    judged = {step: gap for step, gap in judged.items() if gap.old_log_prob.numel()}
    if not judged:  # no sample, or no step of the window
        raise ConfigError(
            f"{folder} holds no sample whose log-probs are all finite: {_why_none(terms, faults)}"
        )
    notes = [*run.notes, *_left_out(terms, trained), *_rounded(Terms.concatenate(list(judged.values())))]
    judged, told = _with_kls(run, judged)
    notes += told
    if LOSS in run.left_out:
        name = run.left_out[LOSS]
        notes.append(
            f"presets are not replayed: {LOSS}={name!r} is code of the run's own; {how_to_allow(name)}"
        )
    gap = Gap.concatenate([Gap.of(one, run.settings[step]) for step, one in judged.items()])
    return report_of(
        f"Audit of {folder}",
        gap,
        Facts.of(
            gap,
            older_weights=_older_weights(run, faults, known=bool(ages) and len(ages) == len(steps)),
            beyond=_beyond(
                run,
                {step: one for step, one in judged.items() if step not in _unmarked(terms)},
                {step: age[finite[step]] for step, age in ages.items() if step in finite},
            ),
        ),
        loss_mode=run.loss_mode,
        presets=presets_of(run),
        faults=faults,
        notes=on_files(notes),
        of_recipe=run.of_flowcorr,
    )


def _unmarked(terms: Mapping[int, DumpedTerms]) -> list[int]:
    """Training steps in bypass mode that do not tell which terms were scored before the first update."""
    return [step for step, one in terms.items() if one.bypass and one.before_update is None]


def _late(terms: Mapping[int, DumpedTerms]) -> int:
    """Terms in bypass mode that were scored after the first update of their training step."""
    marked = [one for one in terms.values() if one.bypass and one.before_update is not None]
    return sum(int(((one.before_update == 0) & trained_log_probs(one).isfinite()).sum()) for one in marked)


def _why_none(terms: Mapping[int, DumpedTerms], faults: Sequence[Finding]) -> str:
    """The reason why no sample has finite log-probs of both stacks at all steps of the window."""
    for one in faults:
        if one.cause == "non_finite":
            return f"{one.sentence} ({one.evidence}); {one.remedy}"
    if _late(terms):
        return (
            "none was scored before the first update in all of its steps (before_update); dump a run that passes once "
            "over each batch (actor.epochs=1), or one that recomputes old log-probs"
        )
    return (
        "none was scored at all steps of the window that any training step scored; score the same steps of the window "
        "in each training step"
    )


def _left_out(terms: Mapping[int, DumpedTerms], trained: Tensor) -> list[str]:
    """A line for each kind of terms that tell nothing about the gap, or too much."""
    lines, late, unmarked = [], _late(terms), _unmarked(terms)
    if not trained.all():
        which = " from before the first update" if late else ""
        lines.append(
            f"{int((~trained).sum())} steps of the window have no log-prob of the trainer{which} in any sample: left "
            "out"
        )
    if late:
        lines.append(f"{late} terms were scored after the first update of their step, so they are left out")
    if unmarked:
        where = "" if len(unmarked) == len(terms) else f" in {len(unmarked)} of {len(terms)} steps"
        lines.append(
            f"in bypass mode the gap is of the current policy, so it holds what was learned{where}; dump before_update"
        )
    return lines


def _older_weights(run: DumpedRun, faults: Sequence[Finding], *, known: bool) -> bool | None:
    """Whether older weights sample; None if the dump leaves it open at some step."""
    if run.setting.staleness > 0 or any(fault.cause == "stale" for fault in faults):
        return True
    return False if known else None


def _beyond(run: DumpedRun, gaps: Mapping[int, Terms], ages: Mapping[int, Tensor]) -> Beyond | None:
    """The step that is beyond the run's precision, of samples of the newest weights or of weights of unknown age.

    Where weights lag by configuration, the gap is not of precision alone.
    """
    newest = [gap.select(ages[step] <= 0) if step in ages else gap for step, gap in gaps.items()]
    newest = [gap for gap in newest if gap.old_log_prob.numel()]
    if not newest or run.setting.staleness > 0:
        return None
    gap = Terms.concatenate(newest)
    return beyond(gap, _stated(run, gap))


def _stated(run: DumpedRun, gap: Terms) -> Stated:
    """The precision that a run states; another trainer's does with the last samples that it captured."""
    if run.config is not None:
        logged = [record.get(VELOCITY_DISTANCE) for record in metrics_of(run.folder)]
        squares = [distance**2 for distance in logged if distance is not None]
        stated = Stated.of(run.config)
        return stated.with_distance(math.sqrt(fmean(squares)), gap) if squares else stated
    captured = list(replay_files(run.folder).values())
    last = load_replay(captured[-1]) if captured else None
    indexed = run.levels is None and all(step.terms.step_indices is not None for step in run.steps.values())
    whole = last is not None and last.step_indices is None
    return Stated.of_captured(last, indexed=indexed or whole)


def presets_of(run: DumpedRun) -> list[Preset]:
    """Replay presets on the dumped steps; empty if their loss may not be imported."""
    if not run.replayable:
        return []
    known = run.of_flowcorr and MODES not in run.left_out  # a correction that can be replayed
    return compare(steps_of(run), run.setting.correction if known else OFF)


def _with_trainer(run: DumpedRun) -> dict[int, DumpedTerms]:
    """The training steps that hold log-probs of the trainer."""
    if not run.with_trainer:
        raise ConfigError(
            f"{run.steps[min(run.steps)].path} holds the rollout's log-probs alone; dump the trainer's as well: "
            "old_log_probs where it recomputes them, or current_log_probs"
        )
    return run.with_trainer


def _judged(gap: Terms) -> Terms:
    """The gap with NaN for terms that are not judged, and for unknown exact KLs and drifts."""
    target, kl = gap.old_log_prob, gap.old_rollout_kl
    unknown = torch.full_like(target, torch.nan)
    kl = unknown if kl is None else kl
    if gap.keep is not None:
        target = torch.where(gap.keep, target, torch.nan)
    return replace(
        gap,
        old_log_prob=target,
        old_rollout_kl=kl.double(),
        drift_square=unknown if gap.drift_square is None else gap.drift_square,
        gradient_square=unknown if gap.gradient_square is None else gap.gradient_square,
        keep=None,
    )


def _with_kls(run: DumpedRun, gaps: dict[int, Terms]) -> tuple[dict[int, Terms], list[str]]:
    """Fill in estimates for exact KLs that were not dumped, and write notes on them.

    Without `num_elements` the spread tells nothing, and a KL is the mean of `-delta`, or 0.
    """
    size = run.num_elements
    exact = {step: gap.old_rollout_kl for step, gap in gaps.items() if gap.old_rollout_kl is not None}
    lacking = {step: kl for step, kl in exact.items() if not kl.isfinite().all()}
    if not lacking:
        return gaps, []
    where = "" if len(lacking) == len(gaps) else f" in {len(lacking)} of {len(gaps)} steps"
    notes = [f"exact KLs were not dumped{where} (old_rollout_kl): estimated from the log-ratios"]
    completed = dict(gaps)
    moments: dict[int, list[tuple[float, float, int]]] = {}
    for step, known in lacking.items():
        gap, kl = gaps[step], known.clone()
        unit = 1.0 if run.setting.densities else 2 * gap.std.double().square()
        log_ratio = delta(gap) / unit
        for index in gap.step_index.unique().tolist():
            here = gap.step_index == index
            values = log_ratio[here]
            mean, square, count = float(values.mean()), float(values.square().mean()), len(values)
            moments.setdefault(index, []).append((mean, square, count))
            estimate = max(-mean, 0.0) if size is None else estimated_kl(mean, square, count, size)
            kl[here & ~kl.isfinite()] = estimate
        completed[step] = replace(gap, old_rollout_kl=kl)
    for index, each in sorted(moments.items()):
        odd = [found for found in each if size is not None and moments_disagree(*found, size)]
        if 2 * len(odd) > len(each):
            mean, square, count = odd[0]
            spread = (square - mean * mean) * count / (count - 1)
            notes.append(
                f"step {index}: delta log p has mean {mean:.1e}, and noise of its spread would have "
                f"{-(size or 0) * spread / 2:.1e}: not rounding alone; compare sigmas, timesteps and num_elements of "
                "both stacks"
            )
    return completed, notes


def _rounded(gap: Terms) -> list[str]:
    """A line for each side with log-probs stored in half precision, if its rounding is coarser than the gap."""
    typical, lines = float(delta(gap).abs().median()), []
    for side, values in (("engine", gap.rollout_log_prob), ("trainer", gap.old_log_prob)):
        dtype = stored_in(values)
        if dtype is None:
            continue
        rounding = torch.finfo(dtype).eps * float(values.abs().median())
        if rounding > 0 and typical <= rounding:
            lines.append(
                f"the log-probs of the {side} were stored in {str(dtype).removeprefix('torch.')}: its rounding of "
                f"{rounding:.1e} reaches the typical |delta log p| of {typical:.1e}, so the gap may be smaller; dump "
                "float32"
            )
    return lines
