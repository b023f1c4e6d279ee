"""A folder of dumped steps, of flowcorr's own run or of any trainer's that called `flowcorr.dump`."""

from __future__ import annotations

import math
import warnings
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
    DumpedFile,
    holds_trainer,
    noise_levels,
    scored_in,
    size_of,
    survey,
    trained_log_probs,
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
        files: by training step, those that can be read.
        num_terms: by training step, SDE steps of all its samples.
        num_elements: `D`, where any file tells it.
        left_out: names of its own code that was not imported, see `RunConfig`.
        without_loss: training steps whose loss is such code.
        notes: what was not dumped and what it would give, and what was left out, a line each.
        levels: noise levels of all steps, highest first, where they have to stand for step indices; else None.
        scored: `[T]` bool, steps of the window that the trainer scores; None where in some training steps it scores
            others. flowcorr's own scores all.
    """

    folder: Path
    settings: Mapping[int, Setting]
    config: Config | None
    loss_mode: str
    files: Mapping[int, Path]
    num_terms: Mapping[int, int]
    num_elements: int | None
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
        return [step for step in self.files if step not in self.without_loss]

    def load(self, step: int) -> DumpedTerms:
        """The terms of a training step; a file without `num_elements` gets the run's."""
        return replace(dumps.load(self.files[step]), num_elements=self.num_elements)


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
    folder: Path, run: RunConfig, files: Mapping[int, DumpedFile], notes: Sequence[str]
) -> DumpedRun:
    """The dumped steps of a run of flowcorr, at least one."""
    return DumpedRun(
        folder=folder,
        settings=dict.fromkeys(files, Setting.of(run.config)),
        config=run.config,
        loss_mode=run.loss_mode,
        **_of_files(files),
        left_out=run.left_out,
        without_loss=frozenset(files if run_config.LOSS in run.left_out else ()),
        notes=(*notes, *run_config.notes(run.left_out)),
        scored=torch.ones(next(iter(files.values())).window, dtype=torch.bool),
    )


def _of_files(files: Mapping[int, DumpedFile]) -> dict[str, Any]:
    return {
        "files": {step: file.path for step, file in files.items()},
        "num_terms": {step: file.num_samples * file.window for step, file in files.items()},
        "num_elements": size_of(files.values()),
    }


def _of_another_trainer(
    folder: Path, by_step: Mapping[int, DumpedFile], notes: list[str], allowed: frozenset[str]
) -> DumpedRun:
    files = list(by_step.values())
    levels, last = noise_levels([file.path for file in files]), files[-1]
    own = [file.loss.loss_mode for file in files if not is_imported(file.loss, allowed)]
    left_out = {run_config.LOSS: own[-1]} if own else {}
    notes = [*notes, *_missing(files), *_differing(files), *run_config.notes(left_out)]
    notes += _stand_ins(files, allowed)
    if levels is None and any(file.last_index is None and file.has_levels for file in files):
        notes.append("sigmas are not those of a schedule, so steps are counted within the window")
    steps = max(file.num_steps(levels) for file in files)
    for file in files:
        clip = file.loss.clip_ratio
        if isinstance(clip, Sequence) and file.num_steps(levels) > len(clip):
            raise ConfigError(
                f"{file.path}: clip_ratio has {len(clip)} values, and the terms of {folder} are of "
                f"{file.num_steps(levels)} steps; give one value for each, or one number"
            )
        steps = max(steps, len(clip) if isinstance(clip, Sequence) else 0)
    return DumpedRun(
        folder=folder,
        settings={
            step: _setting(actor_of(file.loss, allowed), file.bypass, file.window, steps)
            for step, file in by_step.items()
        },
        config=None,
        loss_mode=last.loss.loss_mode,
        **_of_files(by_step),
        left_out=left_out,
        without_loss=frozenset(step for step, file in by_step.items() if not is_imported(file.loss, allowed)),
        notes=tuple(notes),
        levels=levels,
        scored=scored_in([file.scored for file in files]),
    )


def _missing(files: Sequence[DumpedFile]) -> list[str]:
    """A line for each optional field that steps lack, with its use."""
    counts = {name: sum(name in file.missing for file in files) for name in dumps.GIVES}
    if size_of(files) is not None:
        counts["num_elements"] = 0  # one file tells it for all, see `survey`
    lines = [
        f"not dumped{_of_steps(count, len(files))}: {name}, which gives {dumps.GIVES[name]}"
        for name, count in counts.items()
        if count
    ]
    alone = sum(not file.has_trainer for file in files)
    if alone:
        lines.append(
            f"the trainer's log-probs were not dumped{_of_steps(alone, len(files))}: no gap is known there; dump "
            "old_log_probs where it recomputes them, or current_log_probs"
        )
    return lines


def _differing(files: Sequence[DumpedFile]) -> list[str]:
    """A line for each fact of the run that differs by step."""
    lines = []
    bypass = sum(file.bypass for file in files)
    if 0 < bypass < len(files):
        lines.append(f"bypass mode{_of_steps(bypass, len(files))}: each step is judged in its own mode")
    if any(file.loss != files[0].loss for file in files):
        lines.append(
            "loss_mode, clip_ratio or adv_clip_max differ by step: each step is judged by its own, and advice is for "
            f"those of the last, {files[-1].path.name}"
        )
    if len({file.last_index is None for file in files}) > 1:
        lines.append(
            "some files lack step_indices, so that their steps are counted within the window, and stand beside other "
            "steps of the schedule: dump step_indices in each, or delete these files"
        )
    return lines


def _stand_ins(files: Sequence[DumpedFile], allowed: frozenset[str]) -> list[str]:
    """A line for each loss with a limit that dumps do not hold."""
    lines = []
    for name, loss in {file.loss.loss_mode: file.loss for file in files}.items():
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
    window = terms.rollout_log_probs.shape[1]
    last = window - 1 if terms.step_indices is None else int(terms.step_indices.max())
    return _setting(actor_of(loss), terms.bypass, window, last + 1)


def _setting(actor: ActorConfig, bypass: bool, window: int, num_steps: int) -> Setting:
    return Setting(
        actor=actor,
        correction=RolloutCorrectionConfig(bypass_mode=bypass),
        num_steps=num_steps,
        window_size=window,
        window_end=num_steps,
    )


def as_terms(dumped: DumpedTerms, levels: Tensor | None = None, scored: Tensor | None = None) -> Terms:
    """The terms of a dumped step; the old policy stands in for the current one if that was not dumped.

    Unknown noise levels and stds become NaN. Unknown step indices are counted within the window. `keep` is None, or
    False where terms tell nothing about the gap: at steps of the window that nobody trained, of which the trainer has
    NaN in every sample, as flow_grpo's `timestep_fraction` leaves it, and the engine a log-prob; and in bypass mode
    where terms were scored after the step's first update (`before_update`), so that they hold what was learned.

    Args:
        dumped: a training step.
        levels: `noise_levels`, by which steps are counted instead.
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
        step_index=_places(dumped, levels) if dumped.step_indices is None else dumped.step_indices,
        sigma=sigma,
        old_kl=dumped.current_old_kl,
        rollout_kl=dumped.current_rollout_kl,
        old_rollout_kl=dumped.old_rollout_kl,
        drift_square=dumped.drift_squares,
        gradient_square=dumped.gradient_squares,
        keep=None if keep.all() else keep,
        num_elements=dumped.num_elements,
    )


def _places(terms: DumpedTerms, levels: Tensor | None) -> Tensor:
    shape = terms.old_log_probs.shape
    if levels is None or terms.sigmas is None:
        return torch.arange(shape[1]).expand(shape)
    # The nearest level: the place among the middles between neighbours, counted from the highest on.
    rising = levels.flip(0).to(terms.sigmas.dtype)
    return len(levels) - 1 - torch.bucketize(terms.sigmas, (rising[1:] + rising[:-1]) / 2)


def _trained_columns(dumped: DumpedTerms, scored: Tensor | None) -> Tensor:
    """`[T]` bool, without the steps of the window that nobody trained; `scored` as in `as_terms`."""
    untrained = trained_log_probs(dumped).isnan().all(0) & dumped.rollout_log_probs.isfinite().all(0)
    if scored is not None:
        untrained &= ~scored
    return ~untrained | untrained.all()


def gap_of(dumped: DumpedTerms, levels: Tensor | None = None, scored: Tensor | None = None) -> Terms:
    """The gap of a step: `old_log_prob` is the trainer's, in bypass mode of its current policy.

    `levels` and `scored` are as in `as_terms`. An exact KL that was not dumped is None.
    """
    terms = as_terms(dumped, levels, scored)
    return replace(
        terms,
        old_log_prob=terms.log_prob if dumped.bypass else terms.old_log_prob,
        old_kl=None,
        rollout_kl=None,
        old_rollout_kl=terms.rollout_kl if dumped.bypass else terms.old_rollout_kl,
    )


def diagnosed(run: DumpedRun) -> list[Finding]:
    """The faults of the log-probs of dumped steps."""
    loaded = {step: run.load(step) for step in run.files}
    steps = {step: dumped for step, dumped in loaded.items() if holds_trainer(dumped)}
    gaps = {step: gap_of(dumped, run.levels, run.scored) for step, dumped in steps.items()}
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

    Raises:
        ConfigError: a file is damaged.
    """
    by_step = {
        step: step_metrics(run.load(step), setting, run.levels, run.scored)
        for step, setting in run.settings.items()
    }
    return [
        {"step": step} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        for step, metrics in by_step.items()
    ]


def step_metrics(
    dumped: DumpedTerms, setting: Setting, levels: Tensor | None = None, scored: Tensor | None = None
) -> dict[str, float]:
    """The metrics that training would have logged of one step, see `records`; `scored` as in `as_terms`."""
    terms, actor, metrics = as_terms(dumped, levels, scored), setting.actor, Metrics()
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
    logged = reward_metrics(RewardOutput(scores=scores), ~np.isfinite(scores), groups)
    return {name: logged[name] for name in known}
