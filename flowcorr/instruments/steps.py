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
from flowcorr.config.schema import ActorConfig, Config
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.dumps import DumpedTerms, LoggedLoss
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.instruments.faults import diagnose
from flowcorr.instruments.finding import Finding
from flowcorr.instruments.setting import Setting
from flowcorr.instruments.step_files import DumpedFile, noise_levels, scored_in, survey, trained_log_probs
from flowcorr.losses import LOSSES, clip_by_term, flow_grpo, resolve_loss
from flowcorr.metrics import Metrics, maximum
from flowcorr.records import Terms
from flowcorr.rewards import RewardOutput
from flowcorr.trainer import run_config
from flowcorr.trainer.measurements import reward_metrics
from flowcorr.trainer.run_config import CONFIG_FILE, is_file, near_run, read_config
from flowcorr.trainer.run_folder import resume_command

UNBOUNDED = 1e9  # in place of a clip range that is not known: no ratio reaches it
_MORE_STEPS = 10  # that tell something


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedRun:
    """A folder of dumped steps.

    Attributes:
        folder: where they lie.
        setting: its loss, correction and schedule, as far as they are known.
        config: the whole configuration of a run of flowcorr; None of another trainer's.
        loss_mode: the name of its loss, also where `setting` has another that stands in for it.
        files: by training step, those that can be read.
        left_out: names of its own code that was not imported, see `RunConfig`.
        notes: what was not dumped and what it would give, and what was left out, a line each.
        levels: noise levels of all steps, highest first, where they have to stand for step indices; else None.
        scored: `[T]` bool, steps of the window that the trainer scores; None where in some training steps it scores
            others. flowcorr's own scores all.
    """

    folder: Path
    setting: Setting
    config: Config | None
    loss_mode: str
    files: Mapping[int, Path]
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    levels: Tensor | None = None
    scored: Tensor | None = None

    @property
    def of_flowcorr(self) -> bool:
        """Whether flowcorr trained it."""
        return self.config is not None


def is_run(folder: Path) -> bool:
    """Whether flowcorr trained the run of a folder.

    A `config.yaml` right beside dumped steps is another trainer's, as the steps are.
    """
    return is_file(folder / CONFIG_FILE) and all(
        path.parent != folder for path in dumps.files(folder).values()
    )


def read_dumped(folder: Path, *, allow_imports: Collection[str] = ()) -> DumpedRun:
    """Find the dumped steps of a folder and what is known of their run.

    Args:
        folder: a run's folder, or one of dumped steps.
        allow_imports: names of losses and rejection modes of one's own, `package.module:name`, that may be imported.

    Raises:
        ConfigError: the folder holds no dumped step that can be read, or its files are not of one run.

    Warns:
        UserWarning: some files cannot be read, and are left out.
    """
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
    found, notes = survey(files, None if run is None else run.config)
    if not found:
        raise ConfigError(f"{folder}: {notes[0]}")
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    paths = {step: file.path for step, file in found.items()}
    if run is not None:
        return DumpedRun(
            folder=folder,
            setting=Setting.of(run.config),
            config=run.config,
            loss_mode=run.loss_mode,
            files=paths,
            left_out=run.left_out,
            notes=(*notes, *run_config.notes(run.left_out)),
            scored=torch.ones(next(iter(found.values())).window, dtype=torch.bool),
        )
    return _of_another_trainer(folder, paths, list(found.values()), notes, frozenset(allow_imports))


def _of_another_trainer(
    folder: Path,
    paths: Mapping[int, Path],
    found: Sequence[DumpedFile],
    notes: list[str],
    allowed: frozenset[str],
) -> DumpedRun:
    first = found[0]
    terms, loss = dumps.load(first.path), first.loss
    notes = [*notes, *dumps.missing(terms, loss)]
    if any(file.loss != loss for file in found):
        notes.append(
            f"the files differ in loss_mode, clip_ratio or adv_clip_max: judged by those of {first.path.name}"
        )
    if len({file.last_index is None for file in found}) > 1:
        notes.append(
            "some files lack step_indices, so that their steps are counted within the window, and stand beside other "
            "steps of the schedule: dump step_indices in each, or delete these files"
        )
    actor, left_out = _loss_of(first, allowed)
    notes += run_config.notes(left_out)
    if resolve_loss(actor).needs_kl:
        notes.append(
            f"loss {loss.loss_mode} reads step means, which no dump holds: judged as flow_grpo, without its clip range"
        )
    actor = _as_dumped(actor, loss)
    levels = noise_levels(list(paths.values()))
    if levels is None and terms.step_indices is None and terms.sigmas is not None:
        notes.append("sigmas are not those of a schedule, so steps are counted within the window")
    steps = max(file.num_steps(levels) for file in found)
    if isinstance(actor.clip_ratio, tuple):
        given = len(actor.clip_ratio)
        if steps > given:
            raise ConfigError(
                f"{first.path}: clip_ratio has {given} values, and the terms of {folder} are of {steps} steps; give "
                "one value for each, or one number"
            )
        steps = given
    return DumpedRun(
        folder=folder,
        setting=_setting(terms, actor, steps),
        config=None,
        loss_mode=loss.loss_mode,
        files=paths,
        left_out=left_out,
        notes=tuple(notes),
        levels=levels,
        scored=scored_in([file.scored for file in found]),
    )


def setting_of(terms: DumpedTerms, loss: LoggedLoss) -> Setting:
    """The setting of another trainer's run, as far as one step tells it.

    A loss of the run's own is not imported: it is judged as flow_grpo, as are losses that read step means.
    """
    known = ActorConfig(loss_mode=loss.loss_mode) if loss.loss_mode in LOSSES else ActorConfig()
    last = terms.rollout_log_probs.shape[1] - 1 if terms.step_indices is None else terms.step_indices.max()
    return _setting(terms, _as_dumped(known, loss), int(last) + 1)


def _as_dumped(actor: ActorConfig, loss: LoggedLoss) -> ActorConfig:
    """`actor` with the dumped clip ranges.

    Of a loss that reads step means, which no dump holds, the ratio is not known: the default loss stands in for it,
    without its clip range.
    """
    clip = loss.clip_ratio
    if resolve_loss(actor).needs_kl:
        actor, clip = ActorConfig(), None
    clip = UNBOUNDED if clip is None else clip
    return replace(
        actor,
        clip_ratio=clip if isinstance(clip, float | int) else tuple(clip),
        adv_clip_max=loss.adv_clip_max or actor.adv_clip_max,
    )


def _setting(terms: DumpedTerms, actor: ActorConfig, num_steps: int) -> Setting:
    return Setting(
        actor=actor,
        correction=RolloutCorrectionConfig(bypass_mode=terms.bypass),
        num_steps=num_steps,
        window_size=terms.rollout_log_probs.shape[1],
        window_end=num_steps,
    )


def _loss_of(file: DumpedFile, allowed: frozenset[str]) -> tuple[ActorConfig, dict[str, str]]:
    """The loss that a file names, and its name where it is not to be imported and the default stands in for it."""
    name = file.loss.loss_mode
    if name in LOSSES or name in allowed:
        return ActorConfig(loss_mode=name), {}
    if not run_config.is_own_name(name):
        raise ConfigError(f"{file.path}: {unknown_choice('loss_mode', name, LOSSES)}")
    return ActorConfig(), {run_config.LOSS: name}


def completed(dumped: DumpedTerms, levels: Tensor | None = None) -> Terms:
    """The terms of a dumped step; current policy = old one where no score of it was dumped.

    Unknown noise levels and stds become NaN. Unknown step indices are counted within the window.

    Args:
        dumped: a training step.
        levels: `noise_levels`, by which steps are counted instead.
    """
    old = dumped.old_log_probs
    unknown = torch.full_like(old, torch.nan)
    sigma = unknown if dumped.sigmas is None else dumped.sigmas
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
        num_elements=dumped.num_elements,
    )


def _places(terms: DumpedTerms, levels: Tensor | None) -> Tensor:
    shape = terms.old_log_probs.shape
    if levels is None or terms.sigmas is None:
        return torch.arange(shape[1]).expand(shape)
    # The nearest level: the place among the middles between neighbours, counted from the highest on.
    rising = levels.flip(0).to(terms.sigmas.dtype)
    return len(levels) - 1 - torch.bucketize(terms.sigmas, (rising[1:] + rising[:-1]) / 2)


def gap_terms(dumped: DumpedTerms, levels: Tensor | None = None, scored: Tensor | None = None) -> Terms:
    """`completed`, with `keep` where some terms tell nothing about the gap; None where all do.

    Left out are steps of the window that nobody trained: the trainer has NaN in every sample, as flow_grpo's
    `timestep_fraction` leaves it, and the engine a log-prob. In bypass mode, terms that were scored after the step's
    first update (`before_update`) are left out too: they hold what was learned.

    Args:
        dumped: a training step.
        levels: as in `completed`.
        scored: `[T]` bool, steps of the window that the trainer scores: NaN there is a fault.
    """
    terms = completed(dumped, levels)
    keep = _trained_columns(dumped, scored).expand_as(terms.log_prob)
    if dumped.bypass and dumped.before_update is not None:
        keep = keep & dumped.before_update.bool()
    return terms if keep.all() else replace(terms, keep=keep)


def _trained_columns(dumped: DumpedTerms, scored: Tensor | None) -> Tensor:
    """`[T]` bool, without the steps of the window that nobody trained; `scored` as in `gap_terms`."""
    untrained = trained_log_probs(dumped).isnan().all(0) & dumped.rollout_log_probs.isfinite().all(0)
    if scored is not None:
        untrained &= ~scored
    return ~untrained | untrained.all()


def gap_of(dumped: DumpedTerms, levels: Tensor | None = None, scored: Tensor | None = None) -> Terms:
    """The gap of a step: `old_log_prob` is the trainer's, in bypass mode of its current policy.

    `levels` and `scored` are as in `gap_terms`. An exact KL that was not dumped is None.
    """
    terms = gap_terms(dumped, levels, scored)
    return replace(
        terms,
        old_log_prob=trained_log_probs(dumped),
        old_kl=None,
        rollout_kl=None,
        old_rollout_kl=terms.rollout_kl if dumped.bypass else terms.old_rollout_kl,
    )


def diagnosed(
    files: Mapping[int, Path], levels: Tensor | None = None, scored: Tensor | None = None
) -> list[Finding]:
    """The faults of the log-probs of dumped steps; `levels` and `scored` as in `gap_terms`."""
    steps = {step: dumps.load(path) for step, path in files.items()}
    gaps = {step: gap_of(dumped, levels, scored) for step, dumped in steps.items()}
    return diagnose(gaps, ages_of(steps)) if gaps else []


def ages_of(steps: Mapping[int, DumpedTerms]) -> dict[int, Tensor]:
    """By training step, how many versions the weights that sampled were behind, `[B]`, where that was dumped."""
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
    found = {
        step: step_metrics(dumps.load(path), run.setting, run.levels, run.scored)
        for step, path in run.files.items()
    }
    return [
        {"step": step} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        for step, metrics in found.items()
    ]


def step_metrics(
    dumped: DumpedTerms, setting: Setting, levels: Tensor | None = None, scored: Tensor | None = None
) -> dict[str, float]:
    """The metrics that training would have logged of one step, see `records`; `scored` as in `gap_terms`."""
    terms, actor = gap_terms(dumped, levels, scored), setting.actor
    # In bypass mode a current policy that may have learned from the batch already shows no noise.
    noisy = not dumped.bypass or dumped.before_update is not None
    _, metrics = correct(
        terms,
        setting.correction,
        actor_config=actor if noisy and actor.clip_ratio != UNBOUNDED else None,
        num_steps=setting.num_steps,
    )
    if terms.num_elements is not None:
        metrics = metrics.merge(Metrics.from_stats({"rollout/num_elements": maximum(terms.num_elements)}))
    if dumped.current_log_probs is not None:
        trained = completed(dumped, levels).select((slice(None), _trained_columns(dumped, scored)))
        metrics = metrics.merge(_of_update(trained, actor))
    if dumped.rewards is not None:
        metrics = metrics.merge(_of_rewards(dumped))
    return metrics.compute()


def _of_update(terms: Terms, actor: ActorConfig) -> Metrics:
    """The metrics of the loss; without the clipped shares where the clip range is not known."""
    metrics = flow_grpo(
        terms.log_prob,
        terms.old_log_prob,
        terms.advantage,
        clip_ratio=clip_by_term(actor.clip_ratio, terms.step_index),
        adv_clip_max=actor.adv_clip_max,
    ).metrics
    if actor.clip_ratio != UNBOUNDED:
        return metrics
    return metrics.renamed(lambda name: None if name.startswith("actor/pg_clipfrac") else name)


def _of_rewards(terms: DumpedTerms) -> Metrics:
    """The `reward/*` metrics of training that follow from the rewards alone."""
    assert terms.rewards is not None
    scores, known = terms.rewards.double().numpy(), ["reward/mean", "reward/std"]
    groups = np.zeros(len(scores), dtype=np.int64)
    if terms.group_ids is not None:
        groups = terms.group_ids.numpy()
        known.append("reward/zero_std_group_fraction")
    logged = reward_metrics(RewardOutput(scores=scores), ~np.isfinite(scores), groups)
    return logged.renamed(lambda name: name if name in known else None)
