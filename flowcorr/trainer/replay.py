"""Replays of whole images, which watch what a ratio of log-probs cannot see.

The ratio covers the steps of the SDE window, given the latents before each. It does not cover the steps outside the
window, the decoder and the reward. At the first training step and then every `rollout.replay_every` steps, the
training stack repeats one image of each prompt in five legs:

| leg | from | to |
|---|---|---|
| `before` | initial noise | latents before the window's first step |
| `between` | latents after a step of the window | latents before its next one |
| `after` | latents after the window's last step | final latents |
| `decode` | final latents | image |
| `reward` | image | score |

Each leg starts from the rollout's own values, so it does not inherit the differences of the leg before it. The stack
uses its own embeddings of the prompts, its own schedule, and the weights that sampled.

A window of one step has no leg between its steps, and that of a consecutive window has no steps: its ends are equal.
SDE steps of a leg (`sampling.sde_noise_range`) repeat the rollout's noise, which its seeds give.

Rounding moves every step a little, in the window and outside. So the unit of `before`, `between` and `after` is the gap
inside the window, which the ratio sees: about 1 whatever the precision, the guidance and the model. A gap inside the
window that no precision explains is no unit: the largest one that the precision explains takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.actor import DiffusionActor
from flowcorr.actor.scoring import Observe
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError
from flowcorr.metrics import Metrics, maximum, mean
from flowcorr.models import DTYPES, SamplingPlan
from flowcorr.records import Prompt, Rollout, Scores
from flowcorr.rewards import RewardOutput, score_batch
from flowcorr.rollout import decode
from flowcorr.rollout.outside import Repeated, repeat_outside
from flowcorr.rollout.precision import NO_GAP, usual_gap
from flowcorr.rollout.witnesses import seeded_noise, velocity_gap, without_velocity
from flowcorr.trainer.collect import Samples
from flowcorr.trainer.gap_split import behaviour_weights
from flowcorr.trainer.image_statistics import image_residuals
from flowcorr.trainer.noise import WindowResiduals, scored_by_sampler
from flowcorr.trainer.residual_terms import share, terms
from flowcorr.trainer.run import TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageGaps:
    """How far one image is from its replay.

    Attributes:
        window: relative error of the velocity in the SDE window.
        before, between, after: relative error of the mean velocity on the way to the window, between its steps, and on
            the way from it; `between` is 0 for a window of one step.
        decode: mean absolute difference of the pixels, in grey levels of 255; infinite where the training stack's own
            pixels are not finite.
        residuals: `[1]` or `[1, C]`, by name, one of `RESIDUALS`.
    """

    window: float
    before: float
    between: float
    after: float
    decode: float
    residuals: Mapping[str, Tensor]


def replays(config: Config, step: int) -> bool:
    """Whether a training step replays images: the first does, then every one of `rollout.replay_every` steps."""
    every = config.rollout.replay_every
    return every > 0 and (step == 1 or step % every == 0)


@torch.no_grad()
def measure_replay(
    run: TrainingRun, samples: Samples, scored: RewardOutput, step: int
) -> tuple[Metrics, WindowResiduals]:
    """The `rollout_corr/replay/*` metrics of one image of each prompt: mean errors of the legs, largest other gaps.

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
    window = WindowResiduals(
        rollout, run.config, step, noise=False, velocity=not scored_by_sampler(run.config)
    )
    if not rollout.num_samples:
        return Metrics(), window
    members = [
        sde.stable_seed(seed, step, group, "replay") % count for group in rollout.group_ids[::count].tolist()
    ]
    rows = [place * count + member for place, member in enumerate(members)]
    places = samples.fresh[rows]
    prompts, images = [samples.prompts[place] for place in places], samples.images[places]
    chosen = replace(
        rollout.select(torch.tensor(rows)),
        conditioning=run.cache(prompts),
        conditioning_rows=torch.arange(len(prompts), device=run.actor.device),
        images=torch.from_numpy(images).to(run.actor.device),
    )
    gaps = []
    for version in chosen.policy_versions.unique().tolist():
        with behaviour_weights(run.actor, run.engine.history, version):
            # One by one: whatever their windows, all ranks make equally many forward passes, as sharded weights need.
            for place in (chosen.policy_versions == version).nonzero().flatten().tolist():
                sample = chosen.select(slice(place, place + 1))
                gap = _replay(run, sample, step, window.add)
                if places[place] not in samples.broken:
                    gaps.append(gap)
    if not gaps:
        return Metrics(), window
    healthy = usual_gap(run.config, run.actor.family.amplification(run.actor.guidance))
    units = sum(min(max(gap.window, NO_GAP), healthy) for gap in gaps)
    stats = {
        "rollout_corr/replay/window": mean(sum(gap.window for gap in gaps), len(gaps)),
        "rollout_corr/replay/before": mean(sum(gap.before for gap in gaps), units),
        "rollout_corr/replay/after": mean(sum(gap.after for gap in gaps), units),
        "rollout_corr/replay/decode": maximum(max(gap.decode for gap in gaps)),
        "rollout_corr/replay/reward": maximum(_reward_gap(run, images, prompts, scored.scores, places)),
    }
    if rollout.num_steps > 1:
        stats["rollout_corr/replay/between"] = mean(sum(gap.between for gap in gaps), units)
    names = dict.fromkeys(name for gap in gaps for name in gap.residuals)
    residuals = [
        terms(name, torch.cat([gap.residuals[name] for gap in gaps if name in gap.residuals]))
        for name in names
    ]
    return Metrics.merged([Metrics.from_stats(stats), *residuals]), window


def _replay(run: TrainingRun, sample: Rollout, step: int, observe: Observe) -> ImageGaps:
    """The gaps of one image, from its noise to its pixels.

    Args:
        run: the training run.
        sample: the image's, a batch of one.
        step: the training step.
        observe: see `Observe`; called with the scores of the window.
    """
    assert sample.final_latents is not None
    assert sample.images is not None
    actor, config = run.actor, run.config
    conditioned = actor.velocity(sample.sample_conditioning())
    # The timesteps that a transformer of `rollout.dtype` computes with, by the training stack's own schedule.
    schedule = SamplingPlan.of(actor.family, config.sampling).schedule
    before, *between, after = repeat_outside(
        sample,
        config,
        step,
        actor.family.in_dtype(schedule, DTYPES[config.rollout.dtype]),
        lambda latents, timesteps, rows: conditioned(latents, timesteps),
    )
    image, finite = decode(actor.family, sample.final_latents)
    if image.shape != sample.images.shape:
        raise BackendError(
            f"the rollout engine's images have shape {list(sample.images.shape[1:])}, and the trainer decodes "
            f"{list(image.shape[1:])} from their final latents, as evaluations do: Rollout.images must be what the VAE "
            "decodes, neither resized nor cropped"
        )
    decoded = bool(finite.all())
    residuals = image_residuals(sample.images, image) if decoded else {}
    if before.moves:
        residuals["path_before"] = share(before.gap, before.leg.begin)
    moving = [leg for leg in (*between, after) if leg.moves]
    if moving:
        residuals["path_after"] = share(
            _together(leg.gap for leg in moving), _together(leg.way for leg in moving)
        )
    scores = actor.score(sample)
    observe(sample, scores)
    noise = seeded_noise(sample, seed=config.trainer.seed, training_step=step).to(actor.device)
    return ImageGaps(
        window=_window_gap(actor, sample, scores, noise),
        before=_error([before]),
        between=_error(between) if between else 0.0,
        after=_error([after]),
        decode=float((image.float() - sample.images.float()).abs().mean()) if decoded else math.inf,
        residuals=residuals,
    )


def _error(legs: Sequence[Repeated]) -> float:
    """The relative error of the mean velocity in some legs; of the latents, where none of them has steps."""
    ways = [leg.way for leg in legs if leg.moves] or [leg.leg.begin for leg in legs]
    return float(_together(leg.gap for leg in legs).norm() / _together(ways).norm())


def _together(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=1)


def _window_gap(actor: DiffusionActor, sample: Rollout, scores: Scores, noise: Tensor) -> float:
    """The relative error of the velocity in the window, from the step means that the known `noise` leaves."""
    assert scores.means is not None, "`score` returns them"
    still = without_velocity(sample.window, actor.config.sampling)
    arrived = sde.sample(sde.Transition(scores.means, scores.stds, still.step), noise)
    means = scores.means + (sample.window.next_latents - arrived)
    return velocity_gap(means, scores.means, still.mean)


def _reward_gap(
    run: TrainingRun, images: np.ndarray, prompts: list[Prompt], scores: np.ndarray, places: np.ndarray
) -> float:
    """The largest difference of a score when the reward is called again, in standard deviations of all scores.

    Samples that the reward failed on are left out; `-inf` if it failed on all.
    """
    good = np.flatnonzero(np.isfinite(scores[places]))
    if not len(good):
        return -math.inf
    again, _ = score_batch(
        run.reward, images[good], [prompts[place] for place in good], on_error=run.config.reward.on_error
    )
    gap = np.nanmax(np.abs(scores[places[good]] - again.scores), initial=0.0)
    return float(gap / np.nanstd([*scores, *again.scores])) if gap else 0.0
