"""One denoising loop for training and evaluation: Euler steps with a window of SDE steps in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.config.schema import SamplingConfig
from flowcorr.models import ModelFamily, Schedule
from flowcorr.records import Images, Window
from flowcorr.rollout.base import OnImages, ignore_images
from flowcorr.sde.transition import over_elements

DECODE_BATCH = 16  # images that the VAE decodes at a time at most: on a CPU more of them take longer
MISSING = (255, 0, 255)  # red, green and blue of a picture that is not finite, which nobody takes for one
DECODE_ELEMENTS = 2**18  # latent elements that it decodes at a time: those of an image of 1024 x 1024 pixels

Velocity = Callable[[Tensor, Tensor], Tensor]
"""`(latents [B, *L], timesteps [B]) -> velocity [B, *L]`."""
VelocityOf = Callable[[Tensor, Tensor, Tensor | slice], Tensor]
"""`(latents [b, *L], timesteps [b], rows) -> velocity [b, *L]`, of the samples that `rows` picks from the batch."""


@torch.no_grad()
def sample_ode(velocity: Velocity, initial: Tensor, schedule: Schedule) -> Tensor:
    """Final latents `[B, *L]` of the deterministic Euler sampler, from `initial` noise `[B, *L]` float32."""
    latents = initial
    for index, timestep in enumerate(schedule.timesteps):
        sigma, sigma_next = schedule.sigmas[index : index + 2]
        drift = velocity(latents, latents.new_full((len(latents),), timestep))
        latents = latents - (sigma - sigma_next) * drift
    return latents


def step_outside(
    latents: Tensor,
    velocity: Tensor,
    sigmas: Sequence[float],
    sampling: SamplingConfig,
    noise: Tensor | None,
) -> Tensor:
    """Latents `[B, *L]` after a step outside the window: an SDE step with `noise`, or an Euler step if that is None.

    Args:
        latents: `[B, *L]`, before the step.
        velocity: like `latents`.
        sigmas: noise levels before and after the step.
        sampling: transition and noise level.
        noise: standard normal, like `latents`.
    """
    sigma, sigma_next = sigmas
    if noise is None:
        return latents - (sigma - sigma_next) * velocity
    before, after = (latents.new_full((len(latents),), level) for level in sigmas)
    step = sde.transition(sampling.sde_type, latents, velocity, before, after, sampling.noise_level)
    return sde.sample(step, noise)


@torch.no_grad()
def sample_sde_window(
    velocity: VelocityOf,
    initial: Tensor,
    schedule: Schedule,
    sampling: SamplingConfig,
    windows: Tensor,
    noise: Callable[[int, Sequence[int]], Tensor],
    *,
    twins: Sequence[int] | None = None,
    with_means: bool = False,
) -> tuple[Window, Tensor, Tensor]:
    """Trajectories with SDE steps in their windows and in `sampling.sde_noise_range`, and Euler steps elsewhere.

    Twins share a trajectory up to the first SDE step of one of them, whose noise parts them, and each of its steps is
    computed once; so does the actor, see `actor.scoring.distinct_inputs`.

    Args:
        velocity: the model, with conditioning and guidance bound.
        initial: `[B, *L]` float32, noise at the first sigma.
        schedule: the sigma table.
        sampling: transition, noise level, and the range of SDE steps outside the window.
        windows: `[B, T]` int64, each sample's SDE steps that are kept and scored, ascending.
        noise: `(step index, rows)` -> standard normal noise `[b, *L]` of `b` samples of the batch.
        twins: a number for each sample, equal for samples with the same initial noise and conditioning; None if there
            are none.
        with_means: also keep the step means.

    Returns:
        The windows, their log-probs `[B, T]`, and the final latents `[B, *L]`.
    """
    table = initial.new_tensor(schedule.sigmas)
    fed = initial.new_tensor(schedule.timesteps)
    before = initial.new_empty(*windows.shape, *initial.shape[1:])
    after = torch.empty_like(before)
    means = torch.empty_like(before) if with_means else None
    log_probs, stds = initial.new_empty(windows.shape), initial.new_empty(windows.shape)
    steps, noisy = windows.cpu(), sampling.noisy_steps
    starts = [min((first, *noisy[:1])) for first in steps[:, 0].tolist()]
    twins = range(len(initial)) if twins is None else twins
    latents = initial
    for index in range(len(schedule.timesteps)):
        first, places = _distinct(twins, starts, index)
        if len(first) < len(latents):
            chosen = torch.tensor(first, device=latents.device)
            drift = velocity(latents[chosen], fed[index].expand(len(first)), chosen)[places]
        else:
            drift = velocity(latents, fed[index].expand(len(latents)), slice(None))
        # All samples take the Euler step; samples with an SDE step here overwrite theirs below.
        sigma, sigma_next = table[index].expand(len(latents)), table[index + 1].expand(len(latents))
        following = latents - over_elements(sigma - sigma_next, latents) * drift
        at = (steps == index).nonzero(as_tuple=True)  # samples and columns of this step
        rows = torch.arange(len(latents)) if index in noisy else at[0]
        if len(rows):
            step = sde.transition(
                sampling.sde_type,
                latents[rows],
                drift[rows],
                sigma[rows],
                sigma_next[rows],
                sampling.noise_level,
            )
            arrived = sde.sample(step, noise(index, rows.tolist()))
            following[rows] = arrived
            log_prob = sde.log_prob(arrived, step, cps_unscaled=sampling.cps_unscaled)
            kept = torch.isin(rows, at[0])
            before[at], after[at] = latents[at[0]], arrived[kept]
            log_probs[at], stds[at] = log_prob[kept], step.std[kept]
            if means is not None:
                means[at] = step.mean[kept]
        latents = following
    window = Window(
        latents=before,
        next_latents=after,
        step_indices=windows,
        timesteps=fed[windows],
        sigmas=table[windows],
        sigmas_next=table[windows + 1],
        means=means,
        stds=stds,
    )
    return window, log_probs, latents


@torch.no_grad()
def decode(family: ModelFamily, final: Tensor, on_images: OnImages = ignore_images) -> tuple[Images, Tensor]:
    """Decode final latents `[B, *L]`, a few at a time.

    Returns:
        Images, and whether the pixels of each were finite, `[B]` bool. Integers cannot say that: without it, an image
        that overflowed would be an arbitrary one, with a reward.
    """
    size = decoded_together(math.prod(final.shape[1:]))
    images = torch.empty(0, dtype=torch.uint8)
    known: list[Tensor] = []
    for begin in range(0, len(final), DECODE_BATCH):
        batch = final[begin : begin + DECODE_BATCH]
        for place in range(0, len(batch), size):
            decoded, finite = to_images(family.decode(batch[place : place + size]))
            if not known:  # all at once, so that no image stands in memory twice
                images = decoded.new_empty(len(final), *decoded.shape[1:])
            images[begin + place : begin + place + len(decoded)] = decoded
            known.append(finite)
        on_images(images[begin : begin + len(batch)])
    return images, torch.cat(known)


def to_images(pixels: Tensor) -> tuple[Images, Tensor]:
    """A VAE's pixels `[B, 3, H, W]` or `[B, 3, F, H, W]` in [-1, 1] as images, and whether they are finite, `[B]`."""
    if pixels.dim() == 4:
        return _levels(pixels)
    # Frame by frame: beside the pixels of a video, only one frame of it is in floating point.
    videos = pixels.new_empty(len(pixels), *pixels.shape[2:], 3, dtype=torch.uint8)
    finite = torch.ones(len(pixels), dtype=torch.bool, device=pixels.device)
    for place, frame in enumerate(pixels.unbind(2)):
        videos[:, place], whole = _levels(frame)
        finite &= whole
    videos[~finite] = videos.new_tensor(MISSING)
    return videos, finite


def _levels(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Images `[B, H, W, 3]` uint8, and whether they are finite, `[B]`."""
    finite = pixels.isfinite().flatten(1).all(1)
    levels = ((pixels.float().clamp(-1, 1) + 1) * 127.5).movedim(1, -1)
    levels = torch.where(over_elements(finite, levels), levels, levels.new_tensor(MISSING))
    return levels.round().to(torch.uint8).contiguous(), finite


def decoded_together(num_elements: int) -> int:
    """How many images with so many latent elements each are decoded at a time."""
    return max(1, min(DECODE_BATCH, DECODE_ELEMENTS // num_elements))


def _distinct(twins: Sequence[int], starts: Sequence[int], index: int) -> tuple[list[int], list[int]]:
    """Samples with distinct latents at step `index`, and the place of each sample's latents among them."""
    first: list[int] = []
    places: list[int] = []
    together: dict[int, int] = {}  # the place of twins that no noise has parted yet
    for row, (twin, start) in enumerate(zip(twins, starts, strict=True)):
        if index <= start and twin in together:
            places.append(together[twin])
            continue
        if index <= start:
            together[twin] = len(first)
        places.append(len(first))
        first.append(row)
    return first, places
