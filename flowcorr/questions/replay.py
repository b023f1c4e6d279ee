"""Replays whole images: steps, decoder and reward, which no ratio of log-probs covers.

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

The other training steps decode one image alone.

Each leg starts from the rollout's own values, so it does not inherit the differences of the leg before it. The stack
uses its own embeddings of the prompts, its own schedule, and the weights that sampled.

A leg without steps has no error: of a window that begins at the first step, of one step, or of consecutive ones.
SDE steps of a leg (`sampling.sde_noise_range`) repeat the rollout's noise, which its seeds give.

The errors of `before`, `between` and `after` are in units of the gap inside the window, see `outside.window_units`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowcorr.actor import DiffusionActor
from flowcorr.errors import BackendError
from flowcorr.metrics import Stats, maximum, mean
from flowcorr.models import ModelFamily
from flowcorr.questions.compared import Compared, velocity_gaps
from flowcorr.questions.gap_split import behaviour_weights
from flowcorr.questions.images import image_residuals
from flowcorr.questions.legs import LegName, Repeated, errors_by_leg
from flowcorr.questions.noise import WindowResiduals, scored_by_sampler
from flowcorr.questions.outside import repeat_outside, window_units
from flowcorr.questions.residual_terms import share, terms
from flowcorr.records import Rollout
from flowcorr.rollout import Weights, decode

_ROUNDING = 1e-6  # relative: stored scores may be float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """Differences of one image from its replay.

    Attributes:
        window: `[1]`, relative error of the velocity in the SDE window.
        unit: of the errors of the legs, see `window_units`.
        legs: `[1]` by leg that has steps, relative error of the mean velocity.
        decode: mean absolute difference of the pixels, in grey levels of 255; infinite where the training stack's own
            pixels are not finite.
        residuals: `[1]` or `[1, C]`, by name, one of `RESIDUALS`.
    """

    window: Tensor
    unit: float
    legs: Mapping[LegName, Tensor]
    decode: float
    residuals: Mapping[str, Tensor]


@torch.no_grad()
def replay_images(
    actor: DiffusionActor,
    history: Sequence[Weights],
    rollout: Rollout,
    training_step: int,
    usual_gap: float,
) -> tuple[list[Replay], WindowResiduals]:
    """Replay each image of a rollout under the weights that sampled it.

    Images are replayed one by one, so that all ranks make equally many forward passes for any windows, as sharded
    weights need.

    Args:
        actor: the training stack.
        history: the versions that the engine keeps.
        rollout: with its images and its final latents, and the training stack's own conditioning.
        training_step: seeded its noise.
        usual_gap: the largest relative error of a velocity that precision explains.

    Returns:
        A replay of each image, and the residuals of their windows; all ranks have to compute their metrics together.

    Raises:
        BackendError: `history` lacks a version that sampled, or images are of another size.
    """
    window = WindowResiduals(rollout, noise=False, velocity=not scored_by_sampler(actor.config))
    by_place: dict[int, Replay] = {}
    for version in rollout.policy_versions.unique().tolist():
        with behaviour_weights(actor, history, version):
            for place in (rollout.policy_versions == version).nonzero().flatten().tolist():
                image = rollout.select(slice(place, place + 1))
                compared = Compared(rollout=image, actor=actor, training_step=training_step)
                by_place[place] = _replay(compared, usual_gap)
                window.add(compared)
    return [by_place[place] for place in sorted(by_place)], window


def replay_metrics(replays: Sequence[Replay]) -> Stats:
    """`rollout_corr/replay/*` but `reward`, mean errors of the legs and largest other gaps, and the residuals' terms.

    Args:
        replays: of this rank's images.
    """
    if not replays:
        return {}
    stats = {
        "rollout_corr/replay/window": mean(sum(float(one.window) for one in replays), len(replays)),
        "rollout_corr/replay/decode": maximum(max(one.decode for one in replays)),
    }
    for name in dict.fromkeys(name for one in replays for name in one.legs):
        having = [one for one in replays if name in one.legs]
        stats[f"rollout_corr/replay/{name}"] = mean(
            sum(float(one.legs[name]) for one in having), sum(one.unit for one in having)
        )
    for residual in dict.fromkeys(name for one in replays for name in one.residuals):
        values = [one.residuals[residual] for one in replays if residual in one.residuals]
        stats |= terms(residual, torch.cat(values))
    return stats


def _replay(compared: Compared, usual_gap: float) -> Replay:
    """The replay of a rollout of one image, from its noise to its pixels."""
    legs = repeat_outside(compared)
    residuals = _decoded(compared.actor.family, compared.rollout)
    window = velocity_gaps(compared.means_of_seeds, compared.means, compared.still)
    return Replay(
        window=window,
        unit=float(window_units(window, usual_gap)),
        legs={name: errors for name, (errors, _) in errors_by_leg(legs).items()},
        decode=_image_error(residuals),
        residuals={**residuals, **_of_path(legs)},
    )


@torch.no_grad()
def decoder_metrics(family: ModelFamily, rollout: Rollout) -> Stats:
    """`rollout_corr/replay/decode` and the residuals' terms of images, of a rollout of one image.

    Raises:
        BackendError: its image is of another size than the decoded one.
    """
    residuals = _decoded(family, rollout)
    stats = {"rollout_corr/replay/decode": maximum(_image_error(residuals))}
    for name, values in residuals.items():
        stats |= terms(name, values)
    return stats


def _image_error(residuals: Mapping[str, Tensor]) -> float:
    return float(residuals["image_error"]) if residuals else math.inf


def _decoded(family: ModelFamily, rollout: Rollout) -> dict[str, Tensor]:
    """The residuals of the one image of a rollout; none where the training stack's own pixels are not finite.

    Raises:
        BackendError: the image is of another size than the decoded one.
    """
    assert rollout.final_latents is not None
    assert rollout.images is not None
    image, finite = decode(family, rollout.final_latents)
    if image.shape != rollout.images.shape:
        raise BackendError(
            f"the rollout engine's images have shape {list(rollout.images.shape[1:])}, and the trainer decodes "
            f"{list(image.shape[1:])} from their final latents, as evaluations do: Rollout.images must be what the VAE "
            "decodes, neither resized nor cropped"
        )
    return image_residuals(rollout.images, image) if bool(finite.all()) else {}


def _of_path(legs: Sequence[Repeated]) -> dict[str, Tensor]:
    """The residuals of the steps outside the window."""
    before, *others = legs
    residuals = {"path_before": share(before.gap, before.leg.begin)} if before.moves else {}
    moving = [leg for leg in others if leg.moves]
    if moving:
        gaps, ways = (
            torch.cat(parts, dim=1) for parts in zip(*((leg.gap, leg.way) for leg in moving), strict=True)
        )
        residuals["path_after"] = share(gaps, ways)
    return residuals


def reward_gaps(scores: np.ndarray, again: np.ndarray, *, all_scores: np.ndarray) -> np.ndarray:
    """Differences `[b]` between the scores of two calls, in standard deviations of all scores; NaN if a call failed.

    Args:
        scores: `[b]`, of some images.
        again: `[b]`, of the same.
        all_scores: `[B]`, of the first call.
    """
    gaps = np.abs(scores - again)
    gaps[gaps <= _ROUNDING * np.abs(again)] = 0.0  # where all scores are equal, it would be their spread
    return gaps / (float(np.nanstd([*all_scores, *again])) or 1.0)
