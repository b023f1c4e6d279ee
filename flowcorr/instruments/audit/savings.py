"""Compares cheaper rollouts of a recipe with its own: seconds, gap, images and rewards of each.

The same prompts are sampled from the same noise by the recipe's own rollout engine, and once more with each saving.
The reward of the recipe scores all images. A saving may change the window, which the gap says, or the images alone;
then rewards may rank a prompt's images in another order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from flowcorr.advantages import group_advantages, most_varied
from flowcorr.config import resolve_engine
from flowcorr.config.schema import Config
from flowcorr.data import PromptStream, load_prompts
from flowcorr.errors import BackendError, ConfigError
from flowcorr.health.finding import Finding
from flowcorr.instruments.audit.gap import measure_gap
from flowcorr.instruments.audit.measure import NUM_BATCHES, Seconds, few_prompts
from flowcorr.instruments.audit.tables import joint_nats
from flowcorr.instruments.gap_words import two_digits
from flowcorr.instruments.outcome import Column, Fact, Report, Table
from flowcorr.records import Prompt, Terms
from flowcorr.rewards import build_reward, score_batch
from flowcorr.trainer.evaluate import choose_checkpoint
from flowcorr.trainer.run_folder import CHECKPOINTS
from flowcorr.trainer.setup import build_stacks, load_model
from flowcorr.trainer.state import restore_weights

STRIDES = (2, 3)
_RESAMPLES, _TAILS = 2000, (0.025, 0.975)
_LONGER = (
    "a study of the embedded model found runs with one step in place of six as good under an OCR reward, and under a "
    "JPEG's size; neither number decides it for another reward or model"
)
_ROUNDED = (
    "a study of the embedded model found int4 rollouts with recomputed log-probs as good as float32 ones"
)
_EMULATED = "emulated, so its seconds are not those of an engine that computes so"

Interval = tuple[float, float, float]
"""A value, and both ends of its 95 % interval over prompts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """Images of some prompts, as one configuration samples them.

    Attributes:
        seconds: an image of the fastest batch, sampling and decoding; of an engine on this process's CPU, its CPU time.
        gap: the actor's view of the windows.
        images: `[B, ...]` uint8.
        rewards: `[P, n]`, NaN where a sample failed.
    """

    seconds: float
    gap: Terms
    images: np.ndarray
    rewards: np.ndarray


def audit_savings(
    config: Config, *, num_batches: int = NUM_BATCHES, title: str = "", run: Path | None = None
) -> Report:
    """Measure the savings that a configuration offers.

    Args:
        config: the run's configuration; its engine samples with weights of the same step.
        num_batches: batches of prompts, see `flowcorr.instruments.audit.audit`.
        title: the recipe with its overrides, or the run.
        run: the folder of a run, whose last checkpoint samples; else the untrained model does.

    Raises:
        ConfigError: `num_batches` is below 1, or something in `config` cannot work.
        CheckpointError: the checkpoint is missing or damaged.
        BackendError: the recipe's engine does not start, or the reward failed on a sample. A saving with such an error
            is told as not measured.
    """
    if num_batches < 1:
        raise ConfigError(f"--batches {num_batches} measures nothing; use 1 or more")
    config = replace(config, rollout=replace(few_prompts(config), staleness=0, max_staleness=0))
    stream = PromptStream(load_prompts(config.data).train, seed=config.trainer.seed)
    batches = [stream.next(config.rollout.prompts_per_step) for _ in range(num_batches)]
    measure = partial(_measure, batches=batches, run=run)
    own, rows, findings = measure(config), [], []
    for name, changed in savings_of(config).items():
        try:
            cheaper = measure(changed)
        except (ConfigError, BackendError) as error:
            findings.append(
                Finding(level="note", cause="saving", sentence=f"{name}: not measured, since {error}")
            )
            continue
        row = _row(name, own, cheaper, config)
        rows.append(row)
        findings.append(_finding(dict(zip(_NAMES, row, strict=True))))
    return _report(title, own, rows, findings)


def savings_of(config: Config) -> dict[str, Config]:
    """Cheaper configurations by the override that makes each: longer steps, and precisions and syncs of the engine."""
    sampling, rollout = config.sampling, config.rollout
    left = sampling.num_inference_steps - max(sampling.sde_window_range[1], sampling.noisy_steps.stop)
    cheaper = {
        f"sampling.post_window_stride={stride}": replace(
            config, sampling=replace(sampling, post_window_stride=stride)
        )
        for stride in sorted({*STRIDES, left})
        if sampling.post_window_stride < stride <= left
    }
    if rollout.dtype == "float32":
        cheaper["rollout.dtype=bfloat16"] = replace(config, rollout=replace(rollout, dtype="bfloat16"))
    if rollout.name == "in_process":
        for emulate in ("fp8", "int8", "int4"):
            if emulate != rollout.emulate:
                cheaper[f"rollout.emulate={emulate}"] = replace(
                    config, rollout=replace(rollout, emulate=emulate)
                )
    if resolve_engine(rollout.name).compiles:
        sync = "merged" if rollout.engine.get("weight_sync") != "merged" else "lora_tensors"
        options = [("quantization", "fp8"), ("quantization", "int8")]
        if config.model.lora.rank:
            options.append(("weight_sync", sync))
        for key, value in options:
            if rollout.engine.get(key) != value:
                engine = {**rollout.engine, key: value}
                cheaper[f"rollout.engine.{key}={value}"] = replace(
                    config, rollout=replace(rollout, engine=engine)
                )
    return cheaper


def _measure(config: Config, *, batches: Sequence[Sequence[Prompt]], run: Path | None) -> Measured:
    reward = build_reward(config.reward.terms, timeout=config.reward.timeout)
    stacks = build_stacks(config, load_model(config), [prompt for batch in batches for prompt in batch])
    actor, engine, count = stacks.actor, stacks.engine, config.rollout.n
    # Other processes of the machine take no CPU time from this one's.
    in_process = not resolve_engine(config.rollout.name).own_processes and config.rollout.placement == "local"
    on_cpu = in_process and actor.device.type == "cpu"
    seconds = Seconds(actor.device, time.process_time if on_cpu else time.perf_counter)
    gaps, images, rewards = [], [], []
    try:
        if run is not None:
            restore_weights(actor.weights, *choose_checkpoint(run / CHECKPOINTS, "last"))
        engine.sync(actor.weights.snapshot())
        for step, batch in enumerate(batches, 1):
            sample = partial(
                engine.sample, stacks.cache(batch), range(len(batch)), training_step=step, with_means=True
            )
            rollout = seconds.timed("rollout", sample)
            gaps.append(measure_gap(actor, rollout.to(actor.device)))
            pixels = rollout.decoded.cpu().numpy()
            prompts = [prompt for prompt in batch for _ in range(count)]
            scored = score_batch(reward, pixels, prompts, on_error=config.reward.on_error)
            images.append(pixels)
            rewards.append(scored.scores.reshape(len(batch), count))
    finally:
        engine.close()
    return Measured(
        seconds=seconds.fastest("rollout") / (len(batches[0]) * count),
        gap=Terms.concatenate(gaps),
        images=np.concatenate(images),
        rewards=np.concatenate(rewards),
    )


def _row(name: str, own: Measured, cheaper: Measured, config: Config) -> tuple[object, ...]:
    whole = np.isfinite(own.rewards).all(1) & np.isfinite(cheaper.rewards).all(1)
    before, after = own.rewards[whole], cheaper.rewards[whole]
    taught = np.ptp(before, axis=1) > 0 if len(before) else np.zeros(0, dtype=bool)
    ranks = rank_correlations(before[taught], after[taught])
    advantages = [advantages_of(rewards, config) for rewards in (before, after)]
    nats = joint_nats(cheaper.gap)
    grey = np.abs(cheaper.images.astype(np.int16) - own.images).mean()
    return (
        name,
        None if "emulate" in name else cheaper.seconds / own.seconds,
        math.sqrt(2 * nats / (cheaper.gap.old_log_prob.shape[1] * (cheaper.gap.num_elements or 1))),
        nats,
        float(grey),
        over_prompts(lambda rows: ranks[rows].mean(), len(ranks)),
        over_prompts(lambda rows: cosine(advantages[0][rows], advantages[1][rows]), len(before)),
    )


def advantages_of(rewards: np.ndarray, config: Config) -> np.ndarray:
    """Advantages `[P, n]` of rewards `[P, n]`; 0 of images that `rollout.n_learned` leaves out."""
    groups = torch.arange(rewards.size) // max(rewards.shape[1], 1)
    flat = torch.from_numpy(rewards.astype(np.float64)).flatten()
    chosen = most_varied(flat, groups, config.rollout.learned_per_prompt)
    advantages = torch.zeros_like(flat)
    advantages[chosen] = group_advantages(flat[chosen], groups[chosen], std=config.algorithm.advantage_std)
    return advantages.numpy().reshape(rewards.shape)


def rank_correlations(rewards: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Spearman's correlation of the images of each prompt, `[P]`; ties have their average rank.

    Args:
        rewards: `[P, n]`, not all equal within a prompt.
        others: `[P, n]` of the same images; 0 is the correlation of a prompt where these are all equal.
    """
    centred = [_ranks(values) - (values.shape[1] - 1) / 2 for values in (rewards, others)]
    norms = [np.linalg.norm(values, axis=1) for values in centred]
    products = (centred[0] * centred[1]).sum(1)
    return np.divide(products, norms[0] * norms[1], out=np.zeros_like(products), where=norms[1] > 0)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks `[P, n]` from 0 within each row; equal values have their average."""
    below = (values[:, None, :] < values[:, :, None]).sum(2)
    equal = (values[:, None, :] == values[:, :, None]).sum(2)
    return below + (equal - 1) / 2


def cosine(advantages: np.ndarray, others: np.ndarray) -> float:
    """Cosine of two arrays of one shape; NaN if one is 0."""
    norm = np.linalg.norm(advantages) * np.linalg.norm(others)
    return float((advantages * others).sum() / norm) if norm else math.nan


def over_prompts(statistic: Callable[[np.ndarray], float], count: int) -> Interval | None:
    """A statistic of `count` prompts with its bootstrap interval, in which prompts are drawn anew.

    Args:
        statistic: of the prompts at some places, which may repeat.
        count: prompts.

    Returns:
        None where it has no value, or of fewer than two prompts.
    """
    if count < 2 or not math.isfinite(value := float(statistic(np.arange(count)))):
        return None
    draw = np.random.default_rng(0)
    drawn = [statistic(draw.integers(count, size=count)) for _ in range(_RESAMPLES)]
    low, high = np.nanquantile(drawn, _TAILS)
    return value, float(low), float(high)


def _interval(value: Interval) -> str:
    middle, low, high = value
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


_COLUMNS = (
    Column(name="saving", words=True),
    Column(name="seconds", heading="time an image", show="{:.2f}".format),
    Column(name="r", show="{:.2g}".format),
    Column(name="joint_nats", heading="joint nats", show=two_digits),
    Column(name="grey_levels", heading="grey levels", show="{:.2g}".format),
    Column(name="rank", heading="rank of rewards", show=_interval),
    Column(name="cosine", heading="cosine of advantages", show=_interval),
)
_NAMES = tuple(column.name for column in _COLUMNS)


def _report(
    title: str, own: Measured, rows: Sequence[tuple[object, ...]], findings: Sequence[Finding]
) -> Report:
    prompts, count = own.rewards.shape
    doubtful = sum(finding.level == "warning" for finding in findings)
    verdict = f"{len(rows)} cheaper ways to sample were measured"
    verdict += f"; with {doubtful} of them rewards no longer follow the recipe's own images" * bool(doubtful)
    if not rows:
        verdict = "this recipe's engine offers no cheaper way to sample that could be measured"
    nats = joint_nats(own.gap)
    return Report(
        title=f"Savings of {title}",
        verdict=verdict,
        facts=[
            Fact(name="num_prompts", value=prompts, text=f"{prompts} prompts of {count} images each"),
            Fact(
                name="seconds",
                value=own.seconds,
                text=f"sampling and decoding take {own.seconds:.3g} s an image as the recipe does it",
            ),
            Fact(name="joint_nats", value=nats, text=f"its own gap has {nats:.3g} joint nats a window"),
        ],
        tables=[
            Table(
                name="savings",
                title="Savings",
                columns=_COLUMNS,
                rows=rows,
                note="time an image: as a multiple of the recipe's own; r, joint nats: the gap of its window; grey "
                "levels, rank, cosine: images, rewards within a prompt and advantages beside the recipe's own, with "
                "95 % intervals over prompts",
            )
        ],
        findings=findings,
    )


def _finding(row: Mapping[str, object]) -> Finding:
    """Tell a saving in one line: its time, its change of images and rewards, and the evidence that they matter."""
    name, seconds, rank = str(row["saving"]), row["seconds"], row["rank"]
    lost = isinstance(rank, tuple) and rank[1] <= 0
    saved = _EMULATED if seconds is None else f"an image takes {seconds:.2f} of the time"
    changed = f"its images differ by {row['grey_levels']:.2g} grey levels"
    if isinstance(rank, tuple):
        changed += f", and rewards of a prompt rank by {_interval(rank)}"
    known = (
        "rewards may no longer belong to the recipe's own images, so do not learn from them"
        if lost
        else (_LONGER if name.startswith("sampling.") else _ROUNDED)
    )
    return Finding(
        level="warning" if lost else "note",
        cause="saving",
        sentence=f"{name}: {saved}; {changed}; {known}",
    )
