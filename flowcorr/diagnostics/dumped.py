"""A folder of dumped steps, of flowcorr's own run or of any trainer's that called `flowcorr.dump`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowcorr import dumps
from flowcorr.algorithm.apply import correct
from flowcorr.config.schema import ActorConfig, AlgorithmConfig, Config, RolloutConfig, SamplingConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.dumps import DumpedTerms, LoggedTerms
from flowcorr.errors import ConfigError
from flowcorr.losses import flow_grpo, resolve_loss
from flowcorr.metrics import Metrics, Over, maximum, mean
from flowcorr.trainer.run_folder import CONFIG_FILE, load_config, resume_command

UNBOUNDED = 1e9  # in place of a clip range that is not known: no ratio reaches it
_MORE_STEPS = 10  # that tell something
_ROUNDING = 2.0**-8  # relative; noise levels may have been rounded to bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedRun:
    """A folder of dumped steps.

    Attributes:
        folder: where they lie.
        config: the run's; of another trainer's, what its files tell, and defaults.
        files: by training step.
        of_flowcorr: whether flowcorr trained it, so that all of `config` is known.
        notes: what was not dumped and what it would give, a line each.
        levels: noise levels of all steps, highest first, where they have to stand for step indices; else None.
    """

    folder: Path
    config: Config
    files: Mapping[int, Path]
    of_flowcorr: bool
    notes: tuple[str, ...] = ()
    levels: Tensor | None = None


def read_dumped(folder: Path) -> DumpedRun:
    """Find the dumped steps of a folder and what is known of their run.

    Raises:
        ConfigError: the folder holds no dumped step, or a file is damaged.
    """
    files, of_flowcorr = dumps.files(folder), (folder / CONFIG_FILE).is_file()
    if not files and of_flowcorr:
        steps = load_config(folder).trainer.total_steps + _MORE_STEPS
        raise ConfigError(
            f"{folder / dumps.FOLDER} holds no dumped step; train with trainer.dump_log_probs=true, or add steps "
            f"to this run: {resume_command(folder)} trainer.dump_log_probs=true trainer.total_steps={steps}"
        )
    if not files:
        raise ConfigError(
            f"{folder} holds no run ({CONFIG_FILE} is missing) and no dumped step; name the --out of flowcorr train, "
            "or a folder that flowcorr.dump wrote"
        )
    if of_flowcorr:
        return DumpedRun(folder=folder, config=load_config(folder), files=files, of_flowcorr=True)
    first = next(iter(files.values()))
    terms, loss = dumps.load(first), dumps.load_loss(first)
    notes = dumps.missing(terms, loss)
    actor = ActorConfig(loss_mode=loss.loss_mode)
    if resolve_loss(actor).needs_means:
        notes.append(f"loss {loss.loss_mode} reads step means, which no dump holds: judged as flow_grpo")
        actor = ActorConfig()
    clip = UNBOUNDED if loss.clip_ratio is None else loss.clip_ratio
    actor = replace(
        actor,
        clip_ratio=clip if isinstance(clip, float | int) else tuple(clip),
        adv_clip_max=loss.adv_clip_max or actor.adv_clip_max,
    )
    samples, window = terms.rollout_log_probs.shape
    groups = samples if terms.group_ids is None else len(terms.group_ids.unique())
    levels = noise_levels(list(files.values()))
    steps = max(_num_steps(path, levels) for path in files.values())
    config = Config(
        actor=actor,
        sampling=SamplingConfig(
            num_inference_steps=steps, sde_window_range=(0, steps), sde_window_size=window
        ),
        rollout=RolloutConfig(prompts_per_step=max(2, groups), n=max(2, samples // groups)),
        algorithm=AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(bypass_mode=terms.bypass)),
    )
    return DumpedRun(
        folder=folder, config=config, files=files, of_flowcorr=False, notes=tuple(notes), levels=levels
    )


def noise_levels(paths: Sequence[Path]) -> Tensor | None:
    """The noise levels of all steps, highest first, to within the rounding of bfloat16; None where none are needed.

    Samples may have windows of their own, so that a step's place within its window does not tell which step it is.
    """
    if not paths or dumps.load(paths[0]).step_indices is not None:
        return None
    seen = [terms.sigmas.unique() for terms in map(dumps.load, paths) if terms.sigmas is not None]
    if not seen:
        return None
    levels = torch.cat(seen).unique().flip(0)
    new = torch.cat([levels.new_ones(1).bool(), levels[1:] < levels[:-1] * (1 - _ROUNDING)])
    return levels[new]


def completed(terms: DumpedTerms, levels: Tensor | None = None) -> LoggedTerms:
    """The terms with stand-ins for what was not dumped: current policy = old one, steps counted within the window.

    Noise levels, times and rewards become NaN, stds 1; exact KLs and `num_elements` stay unknown.

    Args:
        terms: of a training step.
        levels: `noise_levels`, by which steps are counted instead.
    """
    shape = terms.old_log_probs.shape
    unknown = torch.full(shape, torch.nan)
    values: dict[str, Any] = {
        "num_elements": terms.num_elements,
        "bypass": terms.bypass,
        "current_log_probs": terms.old_log_probs,
        "rewards": unknown[:, 0],
        "timesteps": unknown,
        "sigmas": unknown,
        "sigmas_next": unknown,
        "stds": torch.ones(shape),
        "step_indices": _places(terms, levels),
        "group_ids": torch.arange(shape[0]),
        "policy_versions": torch.zeros(shape[0], dtype=torch.int64),
    }
    return LoggedTerms(**(values | terms.tensors()))


def _places(terms: DumpedTerms, levels: Tensor | None) -> Tensor:
    shape = terms.old_log_probs.shape
    if levels is None or terms.sigmas is None:
        return torch.arange(shape[1]).expand(shape)
    return (terms.sigmas.unsqueeze(-1) - levels).abs().argmin(-1)


def records(run: DumpedRun) -> list[dict[str, Any]]:
    """What training would have logged of each step, as far as the dump tells: drift, ratios of the update, rewards.

    Raises:
        ConfigError: a file is damaged.
    """
    return [{"step": step, **_metrics(dumps.load(path), run)} for step, path in run.files.items()]


def _metrics(dumped: DumpedTerms, run: DumpedRun) -> dict[str, float]:
    config = run.config
    terms, actor = completed(dumped, run.levels), config.actor
    correction = config.algorithm.rollout_correction
    assert correction is not None
    target = terms.current_log_probs if terms.bypass else terms.old_log_probs
    metrics = correct(
        target,
        terms.rollout_log_probs,
        correction,
        mask=None,
        step_index=terms.step_indices,
        # In bypass mode the current policy has learned from the batch already, so its ratios are no noise.
        actor_config=None if terms.bypass or actor.clip_ratio == UNBOUNDED else actor,
        num_elements=terms.num_elements,
        num_steps=config.sampling.num_inference_steps,
    ).metrics
    if terms.num_elements is not None:
        metrics = metrics.merge(Metrics.from_stats({"rollout/num_elements": maximum(terms.num_elements)}))
    if dumped.current_log_probs is not None:
        metrics = metrics.merge(_of_update(terms, actor))
    if dumped.rewards is not None:
        metrics = metrics.merge(_of_rewards(dumped))
    return metrics.compute()


def _of_update(terms: LoggedTerms, actor: ActorConfig) -> Metrics:
    shape = terms.old_log_probs.shape
    clip = actor.clip_ratio
    by_term = torch.tensor(clip)[terms.step_indices] if isinstance(clip, tuple) else clip
    return flow_grpo(
        terms.current_log_probs,
        terms.old_log_probs,
        terms.advantages[:, None].expand(shape),
        clip_ratio=by_term,
        adv_clip_max=actor.adv_clip_max,
    ).metrics


def _of_rewards(terms: DumpedTerms) -> Metrics:
    assert terms.rewards is not None
    scores = terms.rewards[terms.rewards.isfinite()]
    good = Over(torch.ones_like(scores, dtype=torch.bool))
    stats = {"reward/mean": good.mean(scores), "reward/std": good.std(scores)}
    if terms.group_ids is not None:
        groups = [terms.rewards[terms.group_ids == group] for group in terms.group_ids.unique()]
        flat = sum(bool((group == group[0]).all()) for group in groups)
        stats["reward/zero_std_group_fraction"] = mean(flat, len(groups))
    return Metrics.from_stats(stats)


def _num_steps(path: Path, levels: Tensor | None) -> int:
    return int(completed(dumps.load(path), levels).step_indices.max()) + 1
