"""A folder of dumped steps, of flowcorr's own run or of any trainer's that called `flowcorr.dump`."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowcorr import dumps
from flowcorr.algorithm.apply import correct
from flowcorr.algorithm.score_drift import score_drift
from flowcorr.config.schema import ActorConfig, Config
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.dumps import DumpedTerms, LoggedLoss
from flowcorr.errors import ConfigError
from flowcorr.health.finding import Finding
from flowcorr.health.setting import Setting
from flowcorr.instruments.dumped_loss import (
    UNBOUNDED,
    actor_of,
    is_imported,
    ratio_limit,
    reads_means,
    without_clipped_shares,
)
from flowcorr.instruments.faults import diagnose
from flowcorr.instruments.step_files import (
    DumpedStep,
    counted_by_levels,
    holds_trainer,
    noise_levels,
    num_steps_of,
    scored_columns,
    scored_in,
    survey,
    trained_log_probs,
    window_of,
)
from flowcorr.losses import clip_by_term, flow_grpo, resolve_loss
from flowcorr.losses.table import CLIP
from flowcorr.metrics import Metrics, Stats, maximum
from flowcorr.records import Terms
from flowcorr.rewards import RewardOutput
from flowcorr.rewards.statistics import reward_metrics
from flowcorr.trainer import run_config
from flowcorr.trainer.run_config import CONFIG_FILE, RunConfig, check_folder, is_file, near_run, read_config
from flowcorr.trainer.run_folder import resume_command

_MORE_STEPS = 10  # that tell something


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedRun:
    """A folder of dumped steps.

    Attributes:
        folder: where they lie.
        settings: by training step, its loss, correction and schedule, as far as they are known.
        config: the whole configuration of a run of flowcorr; None of another trainer's.
        loss_mode: the name of its loss, also where `setting` has another that stands in for it.
        steps: by training step, those whose files can be read.
        left_out: names of its own code that was not imported, see `RunConfig`.
        without_loss: training steps whose loss is such code.
        notes: what was not dumped and what it would give, and what was left out, a line each.
        levels: noise levels of all steps, highest first, by which steps without indices were counted; None if they
            were not.
        scored: `[T]` bool, steps of the window that the trainer scores; None where in some training steps it scores
            others. flowcorr's own scores all.
    """

    folder: Path
    settings: Mapping[int, Setting]
    config: Config | None
    loss_mode: str
    steps: Mapping[int, DumpedStep]
    left_out: Mapping[str, str] = field(default_factory=dict)
    without_loss: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    levels: Tensor | None = None
    scored: Tensor | None = None

    @property
    def of_flowcorr(self) -> bool:
        """Whether flowcorr trained it."""
        return self.config is not None

    @property
    def setting(self) -> Setting:
        """The setting of its last step, with which it goes on."""
        return self.settings[max(self.settings)]

    @property
    def replayable(self) -> list[int]:
        """Training steps with a known loss; a user's own loss may not be imported."""
        return [step for step in self.steps if step not in self.without_loss]

    @property
    def num_elements(self) -> int | None:
        """`D`, where any file tells it."""
        return next(iter(self.steps.values())).terms.num_elements

    @property
    def with_trainer(self) -> dict[int, DumpedTerms]:
        """By training step, the terms with log-probs of the trainer."""
        return {number: step.terms for number, step in self.steps.items() if holds_trainer(step.terms)}


def is_run(folder: Path) -> bool:
    """Whether flowcorr trained the run of a folder.

    A `config.yaml` right beside dumped steps is another trainer's, as the steps are.
    """
    return is_file(folder / CONFIG_FILE) and all(
        path.parent != folder for path in dumps.files(folder).values()
    )


def read_dumped(folder: Path, *, allow_imports: Collection[str] = ()) -> DumpedRun:
    """Find the dumped steps of a folder, and the facts about their run.

    Args:
        folder: a run's folder, or one of dumped steps.
        allow_imports: names of losses and rejection modes of one's own, `package.module:name`, that may be imported.

    Raises:
        ConfigError: the folder holds no dumped step that can be read, or its files are not of one run.

    Warns:
        UserWarning: some files cannot be read, and are left out.
    """
    check_folder(folder)
    files, of_flowcorr = dumps.files(folder), is_run(folder)
    if not files and of_flowcorr:
        steps = read_config(folder).config.trainer.total_steps + _MORE_STEPS
        raise ConfigError(
            f"{folder / dumps.FOLDER} holds no dumped step; train with trainer.dump_log_probs=true, or add steps "
            f"to this run: {resume_command(folder)} trainer.dump_log_probs=true trainer.total_steps={steps}"
        )
    if not files:
        raise ConfigError(
            f"{folder} holds no run ({CONFIG_FILE} is missing) and no dumped step{near_run(folder)}; name the --out of "
            "flowcorr train, or a folder that flowcorr.dump wrote"
        )
    run = read_config(folder, allow_imports=allow_imports) if of_flowcorr else None
    examined, notes = survey(files, None if run is None else run.config)
    if not examined:
        raise ConfigError(f"{folder}: {notes[0]}")
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    if run is not None:
        return of_own_run(folder, run, examined, notes)
    return _of_another_trainer(folder, examined, notes, frozenset(allow_imports))


def of_own_run(
    folder: Path, run: RunConfig, steps: Mapping[int, DumpedStep], notes: Sequence[str]
) -> DumpedRun:
    """The dumped steps of a run of flowcorr, at least one."""
    return DumpedRun(
        folder=folder,
        settings=dict.fromkeys(steps, Setting.of(run.config)),
        config=run.config,
        loss_mode=run.loss_mode,
        steps=steps,
        left_out=run.left_out,
        without_loss=frozenset(steps if run_config.LOSS in run.left_out else ()),
        notes=(*notes, *run_config.notes(run.left_out)),
        scored=torch.ones(window_of(next(iter(steps.values())).terms), dtype=torch.bool),
    )


def _of_another_trainer(
    folder: Path, by_step: Mapping[int, DumpedStep], notes: list[str], allowed: frozenset[str]
) -> DumpedRun:
    steps = list(by_step.values())
    levels = noise_levels(step.terms for step in steps)
    own = [step.loss.loss_mode for step in steps if not is_imported(step.loss, allowed)]
    left_out = {run_config.LOSS: own[-1]} if own else {}
    notes = [*notes, *_missing(steps), *_differing(steps), *run_config.notes(left_out)]
    notes += _stand_ins(steps, allowed)
    if levels is None and any(
        step.terms.step_indices is None and step.terms.sigmas is not None for step in steps
    ):
        notes.append("sigmas are not those of a schedule, so steps are counted within the window")
    num_steps = 0
    for step in steps:
        clip, count = step.loss.clip_ratio, num_steps_of(step.terms, levels)
        if isinstance(clip, Sequence) and count > len(clip):
            raise ConfigError(
                f"{step.path}: clip_ratio has {len(clip)} values, and the terms of {folder} are of "
                f"{count} steps; give one value for each, or one number"
            )
        num_steps = max(num_steps, count, len(clip) if isinstance(clip, Sequence) else 0)
    if levels is not None:
        by_step = {
            number: replace(step, terms=counted_by_levels(step.terms, levels))
            for number, step in by_step.items()
        }
    return DumpedRun(
        folder=folder,
        settings={
            number: _setting(actor_of(step.loss, allowed), step.terms, num_steps)
            for number, step in by_step.items()
        },
        config=None,
        loss_mode=steps[-1].loss.loss_mode,
        steps=by_step,
        left_out=left_out,
        without_loss=frozenset(
            number for number, step in by_step.items() if not is_imported(step.loss, allowed)
        ),
        notes=tuple(notes),
        levels=levels,
        scored=scored_in([scored_columns(step.terms) for step in steps]),
    )


def _missing(steps: Sequence[DumpedStep]) -> list[str]:
    """A line for each optional field that steps lack, with its use."""
    missing = Counter(name for step in steps for name in dumps.missing(step.terms, step.loss))
    lines = [
        f"not dumped{_of_steps(missing[name], len(steps))}: {name}, which gives {use}"
        for name, use in dumps.GIVES.items()
        if missing[name]
    ]
    alone = sum(not holds_trainer(step.terms) for step in steps)
    if alone:
        lines.append(
            f"the trainer's log-probs were not dumped{_of_steps(alone, len(steps))}: no gap is known there; dump "
            "old_log_probs where it recomputes them, or current_log_probs"
        )
    return lines


def _differing(steps: Sequence[DumpedStep]) -> list[str]:
    """A line for each fact of the run that differs by step."""
    lines = []
    bypass = sum(step.terms.bypass for step in steps)
    if 0 < bypass < len(steps):
        lines.append(f"bypass mode{_of_steps(bypass, len(steps))}: each step is judged in its own mode")
    if any(step.loss != steps[0].loss for step in steps):
        lines.append(
            "loss_mode, clip_ratio or adv_clip_max differ by step: each step is judged by its own, and advice is for "
            f"those of the last, {steps[-1].path.name}"
        )
    if len({step.terms.step_indices is None for step in steps}) > 1:
        lines.append(
            "some files lack step_indices, so that their steps are counted within the window, and stand beside other "
            "steps of the schedule: dump step_indices in each, or delete these files"
        )
    return lines


def _stand_ins(steps: Sequence[DumpedStep], allowed: frozenset[str]) -> list[str]:
    """A line for each loss with a limit that dumps do not hold."""
    lines = []
    for name, loss in {step.loss.loss_mode: step.loss for step in steps}.items():
        limit = resolve_loss(actor_of(loss, allowed)).limit
        if reads_means(loss, allowed):
            lines.append(
                f"loss {name} reads step means, which no dump holds: judged as flow_grpo, without its clip range"
            )
        elif limit is not None and limit != CLIP:
            lines.append(f"loss {name} has {limit.key}, which no dump holds: judged without it")
    return lines


def _of_steps(count: int, total: int) -> str:
    return "" if count == total else f" in {count} of {total} steps"


def setting_of(terms: DumpedTerms, loss: LoggedLoss) -> Setting:
    """The setting of another trainer's run, as far as one step tells it; see `actor_of`."""
    return _setting(actor_of(loss), terms, num_steps_of(terms))


def _setting(actor: ActorConfig, terms: DumpedTerms, num_steps: int) -> Setting:
    return Setting(
        actor=actor,
        correction=RolloutCorrectionConfig(bypass_mode=terms.bypass),
        num_steps=num_steps,
        window_size=window_of(terms),
        window_end=num_steps,
    )


def as_terms(dumped: DumpedTerms, scored: Tensor | None = None) -> Terms:
    """The terms of a dumped step; the old policy stands in for the current one if that was not dumped.

    Unknown noise levels and stds become NaN. Unknown step indices are counted within the window. `keep` is None, or
    False where terms tell nothing about the gap: at steps of the window that nobody trained, of which the trainer has
    NaN in every sample, as flow_grpo's `timestep_fraction` leaves it, and the engine a log-prob; and in bypass mode
    where terms were scored after the step's first update (`before_update`), so that they hold what was learned.

    Args:
        dumped: a training step.
        scored: `[T]` bool, steps of the window that the trainer scores: NaN there is a fault.
    """
    old = dumped.old_log_probs
    unknown = torch.full_like(old, torch.nan)
    sigma = unknown if dumped.sigmas is None else dumped.sigmas
    keep = _trained_columns(dumped, scored).expand_as(old)
    if dumped.bypass and dumped.before_update is not None:
        keep = keep & dumped.before_update.bool()
    return Terms(
        log_prob=old if dumped.current_log_probs is None else dumped.current_log_probs,
        old_log_prob=old,
        rollout_log_prob=dumped.rollout_log_probs,
        advantage=dumped.advantages[:, None].expand_as(old),
        std=unknown if dumped.stds is None else dumped.stds,
        step=unknown if dumped.sigmas_next is None else sigma - dumped.sigmas_next,
        step_index=torch.arange(old.shape[1]).expand(old.shape)
        if dumped.step_indices is None
        else dumped.step_indices,
        sigma=sigma,
        old_kl=dumped.current_old_kl,
        rollout_kl=dumped.current_rollout_kl,
        old_rollout_kl=dumped.old_rollout_kl,
        drift_square=dumped.drift_squares,
        gradient_square=dumped.gradient_squares,
        keep=None if keep.all() else keep,
        num_elements=dumped.num_elements,
    )


def _trained_columns(dumped: DumpedTerms, scored: Tensor | None) -> Tensor:
    """`[T]` bool, without the steps of the window that nobody trained; `scored` as in `as_terms`."""
    untrained = trained_log_probs(dumped).isnan().all(0) & dumped.rollout_log_probs.isfinite().all(0)
    if scored is not None:
        untrained &= ~scored
    return ~untrained | untrained.all()


def gap_of(dumped: DumpedTerms, scored: Tensor | None = None) -> Terms:
    """The gap of a step: `old_log_prob` is the trainer's, in bypass mode of its current policy.

    `scored` is as in `as_terms`. An exact KL that was not dumped is None.
    """
    terms = as_terms(dumped, scored)
    return replace(
        terms,
        old_log_prob=terms.log_prob if dumped.bypass else terms.old_log_prob,
        old_kl=None,
        rollout_kl=None,
        old_rollout_kl=terms.rollout_kl if dumped.bypass else terms.old_rollout_kl,
    )


def diagnosed(run: DumpedRun) -> list[Finding]:
    """The faults of the log-probs of dumped steps."""
    steps = run.with_trainer
    gaps = {step: gap_of(dumped, run.scored) for step, dumped in steps.items()}
    return diagnose(gaps, ages_of(steps)) if gaps else []


def ages_of(steps: Mapping[int, DumpedTerms]) -> dict[int, Tensor]:
    """By training step, the age in versions of the weights that sampled, `[B]`, for steps that dumped it."""
    return {
        step: dumped.version - dumped.policy_versions
        for step, dumped in steps.items()
        if dumped.policy_versions is not None and dumped.version is not None
    }


def records(run: DumpedRun) -> list[dict[str, Any]]:
    """The metrics that training would have logged of each step, as far as the dump tells: drift, update, rewards.

    A metric that is not finite is None, as in `metrics.jsonl`.
    """
    by_step = {
        number: step_metrics(step.terms, run.settings[number], run.scored)
        for number, step in run.steps.items()
    }
    return [
        {"step": step} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        for step, metrics in by_step.items()
    ]


def step_metrics(dumped: DumpedTerms, setting: Setting, scored: Tensor | None = None) -> dict[str, float]:
    """The metrics that training would have logged of one step, see `records`; `scored` as in `as_terms`."""
    terms, actor, metrics = as_terms(dumped, scored), setting.actor, Metrics()
    # In bypass mode a current policy that may have learned from the batch already shows no noise.
    noisy = not dumped.bypass or dumped.before_update is not None
    if holds_trainer(dumped):
        _, metrics = correct(
            terms,
            setting.correction,
            actor_config=actor if noisy and ratio_limit(actor) is not None else None,
            num_steps=setting.num_steps,
        )
        metrics = metrics.merge(score_drift(terms, setting.num_steps))
    if terms.num_elements is not None:
        metrics = metrics.merge({"rollout/num_elements": maximum(terms.num_elements)})
    if dumped.current_log_probs is not None:
        trained = terms.select((slice(None), _trained_columns(dumped, scored)))
        metrics = metrics.merge(_of_update(trained, actor))
    if dumped.rewards is not None:
        metrics = metrics.merge(_of_rewards(dumped))
    return metrics.compute()


def _of_update(terms: Terms, actor: ActorConfig) -> Metrics:
    """The metrics of the loss, without the clipped shares if the clip range is unknown."""
    clip = clip_by_term(actor.clip_ratio, terms.step_index)
    metrics = flow_grpo(
        terms.log_prob, terms.old_log_prob, terms.advantage, clip_ratio=clip, adv_clip_max=actor.adv_clip_max
    ).metrics
    return without_clipped_shares(metrics) if actor.clip_ratio == UNBOUNDED else metrics


def _of_rewards(terms: DumpedTerms) -> Stats:
    """The `reward/*` metrics of training that follow from the rewards alone."""
    assert terms.rewards is not None
    scores, known = terms.rewards.double().numpy(), ["reward/mean", "reward/std"]
    groups = np.zeros(len(scores), dtype=np.int64)
    if terms.group_ids is not None:
        groups = terms.group_ids.numpy()
        known.append("reward/zero_std_group_fraction")
    logged = reward_metrics(RewardOutput(scores=scores), groups)
    return {name: logged[name] for name in known}
