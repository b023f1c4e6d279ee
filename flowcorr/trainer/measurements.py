"""Measures everything in a training step except its correction and its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from flowcorr import distributed, sde
from flowcorr.algorithm.by_worker import by_worker
from flowcorr.algorithm.terms import batch_terms
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError, ConfigError
from flowcorr.health.metric import Metric
from flowcorr.metrics import Metrics, Stat, Stats, maximum
from flowcorr.questions.gap_split import measure_gap_split, splits_gap
from flowcorr.questions.noise import WindowResiduals
from flowcorr.questions.question import REWARD
from flowcorr.questions.replay import decoder_metrics, replay_images, replay_metrics, reward_gaps
from flowcorr.records import ActorBatch, Scores, Terms
from flowcorr.rewards import RewardOutput, score_batch
from flowcorr.rewards.statistics import image_metrics, reward_metrics
from flowcorr.trainer.collect import Samples
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.timing import Stopwatch


def measure(
    run: TrainingRun,
    samples: Samples,
    scored: RewardOutput,
    batch: ActorBatch,
    old: Scores | None,
    step: int,
    watch: Stopwatch,
) -> list[Metrics | Stats]:
    """Measure images, rewards, decoder and the gap of each worker; every few steps, split the gap and replay images.

    Args:
        run: the training run, whose weights are still those that sampled.
        samples: of training step `step`.
        scored: their scores, `[B]`.
        batch: the samples that the actor will learn from, before their correction.
        old: the scores of `batch` under the old policy; None in bypass mode.
        step: the training step.
        watch: takes the time.

    Raises:
        BackendError: see `measure_gap_split` and `measure_replay`.
    """
    config = run.config
    whole = np.array([place not in samples.broken for place in range(len(samples.images))])
    measured: list[Metrics | Stats] = [
        image_metrics(samples.images, samples.group_ids, whole),
        reward_metrics(scored, samples.group_ids),
        {
            "rollout/num_elements": maximum(samples.rollout.num_elements),
            "rollout/usual_gap": maximum(run.usual_gap),
        },
    ]
    mode, terms = run.mode.correction.mode, batch_terms(batch)
    if mode != "bypass":
        measured.append(own_metrics(run.rows, terms))
    if mode == "decoupled":
        workers, steps = config.rollout.num_workers, config.sampling.num_inference_steps
        measured.append(by_worker([terms], workers, steps))
    if splits_gap(config, step):
        with watch("drift"):
            measured.append(measure_gap_split(run.actor, run.engine.history, batch.rollout, old))
    if replays(config, step):
        sharded = run.actor.weights.sharded
        replay = distributed.fail_together("the replay of a few images", has_collectives=sharded)
        with watch("replay"):
            with replay:
                stats, window = measure_replay(run, samples, scored, step)
            measured += [stats, window.metrics()]
    elif config.rollout.replay_every:
        with watch("replay"):
            measured.append(measure_decoder(run, samples, step))
    return measured


def replays(config: Config, step: int) -> bool:
    """Whether a training step replays images: the first does, then every one of `rollout.replay_every` steps."""
    every = config.rollout.replay_every
    return every > 0 and (step == 1 or step % every == 0)


def measure_decoder(run: TrainingRun, samples: Samples, step: int) -> Stats:
    """The decoder's part of a replay, of the one image of a training step that the seeds choose.

    Returns:
        The metrics of the rank that has the image, if it is whole; none on the others.

    Raises:
        BackendError: the image is of another size than the decoded one.
    """
    rollout, settings, seed = samples.rollout, run.config.rollout, run.config.trainer.seed
    group = sde.stable_seed(seed, step, "decoder") % settings.prompts_per_step
    rows = (rollout.group_ids == group).nonzero().flatten().tolist()
    if rollout.final_latents is None or not rows:
        return {}
    row = rows[sde.stable_seed(seed, step, group, "decoder") % len(rows)]
    place = samples.fresh[row]
    if place in samples.broken:
        return {}
    image = torch.from_numpy(samples.images[[place]]).to(run.actor.device)
    chosen = replace(rollout.select(slice(row, row + 1)), images=image)
    return decoder_metrics(run.actor.family, chosen)


def measure_replay(
    run: TrainingRun, samples: Samples, scored: RewardOutput, step: int
) -> tuple[Stats, WindowResiduals]:
    """The `rollout_corr/replay/*` metrics of one image of each prompt, which the seeds choose.

    Args:
        run: the training run.
        samples: of training step `step`.
        scored: their scores.
        step: the training step.

    Returns:
        The metrics of this rank's images, none if it has none; and the residuals of their windows, whose metrics all
        ranks have to compute together.

    Raises:
        BackendError: the engine returned no final latents, or does not keep the weights that sampled.
    """
    rollout, seed, count = samples.rollout, run.config.trainer.seed, run.config.rollout.n
    if rollout.final_latents is None:
        raise BackendError(
            "the rollout engine returned no Rollout.final_latents, so nothing can be replayed; return them, or set "
            "rollout.replay_every: 0"
        )
    members = [
        sde.stable_seed(seed, step, group, "replay") % count for group in rollout.group_ids[::count].tolist()
    ]
    rows = [place * count + member for place, member in enumerate(members)]
    places = samples.fresh[rows]
    prompts, images = [samples.prompts[place] for place in places], samples.images[places]
    chosen = rollout.select(torch.tensor(rows, dtype=torch.int64))
    if rows:
        chosen = replace(
            chosen,
            conditioning=run.cache(prompts),
            conditioning_rows=torch.arange(len(prompts), device=run.actor.device),
            images=torch.from_numpy(images).to(run.actor.device),
        )
    replayed, window = replay_images(run.actor, run.engine.history, chosen, step, run.usual_gap)
    whole = [one for one, place in zip(replayed, places, strict=True) if place not in samples.broken]
    if not whole:
        return {}, window
    stats = replay_metrics(whole)
    good = np.flatnonzero(np.isfinite(scored.scores[places]))
    if len(good):
        again = score_batch(
            run.reward, images[good], [prompts[place] for place in good], on_error=run.config.reward.on_error
        )
        gaps = reward_gaps(scored.scores[places[good]], again.scores, all_scores=scored.scores)
        stats[REWARD.logged_as] = maximum(np.nanmax(gaps, initial=0.0))
    return stats, window


def own_metrics(rows: Sequence[Metric], terms: Terms) -> Stats:
    """The metrics of `trainer.metrics`.

    Args:
        rows: of all metrics; those that measure themselves are the user's.
        terms: their `log_prob` is the policy's that is compared with the rollout's.

    Raises:
        ConfigError: a measure returns no stat.
    """
    stats: Stats = {}
    for row in rows:
        if row.measure is None:
            continue
        stat = row.measure(terms.windows())
        if not isinstance(stat, Stat):
            raise ConfigError(
                f"trainer.metrics: the measure of {row.name!r} returned a {type(stat).__name__}; return a stat of "
                "flowcorr.metrics, such as mean(values.sum(), count), which merges over parts and ranks"
            )
        stats[row.name] = stat
    return stats
