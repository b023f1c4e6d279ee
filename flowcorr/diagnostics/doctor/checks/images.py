"""The check of the images: it covers the steps after the window and the decoder, which no log-prob does."""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.diagnostics.doctor.exam import WARN_FACTOR, Exam
from flowcorr.diagnostics.doctor.findings import Finding, failed, judged, skipped
from flowcorr.diagnostics.doctor.trials import TRAINING_STEP
from flowcorr.rollout.sampler import decode, step_outside

IMAGE_ROUNDING = 0.5  # grey levels of 255: images are rounded to integers
DECODER_ROUNDING = 1.0  # grey levels of a VAE in lower precision than float32
# Errors of the velocity accumulate over the steps after the window. They are smooth, and change an image more than
# twice as much as random noise of the same size: by up to 4.4 grey levels in clean fp8.
SMOOTH = 3.0
# Where a model decides late what it draws, a small error sends single images another way: 17 beside 13 grey levels in
# clean fp8, 41 beside 27 in int4, one image in about fifty.
ANOTHER_WAY = 3.0
# An image belongs to another sample where it is much closer to that one, and as close as images usually are to their
# own: a group's images are all alike.
SWAPPED = 0.5  # ratio of distances
CLOSE = 3.0  # times the usual distance


def check_images(exam: Exam) -> Finding:
    """Whether each image belongs to its own latents: half of them closely, and each at least roughly."""
    rollout = exam.trials.base.rollout
    if rollout.images is None:
        return skipped("the engine decodes no images")
    expected, finite, usual = _expected(exam)
    if not bool(finite.all()):
        return failed(
            f"the actor decodes {int((~finite).sum())} of {len(finite)} images to pixels that are not finite, and the "
            "engine does not say so of its own",
            f"the VAE overflows in model.dtype={exam.config.model.dtype}, or its weights are damaged: try float32 "
            "there, and return Rollout.finite_images",
        )
    found = rollout.images.to(expected.device).float()
    if found.shape != expected.shape:
        return failed(
            f"images are {list(found.shape[1:])} in the engine and {list(expected.shape[1:])} here",
            "pass sampling.height and sampling.width to the engine",
        )
    gaps = torch.stack([(image - expected).abs().flatten(1).mean(1) for image in found])
    own = gaps.diagonal()
    exchanged = find_exchanged(gaps)
    if exchanged is not None:
        worst, other = exchanged
        return failed(
            f"sample {worst} has the image of sample {other}: it differs by {float(gaps[worst, other]):.2g} "
            f"grey levels of 255 from that one, and by {float(own[worst]):.2g} from its own",
            "keep the order of samples in a batch: row i of images, latents and rewards must be the same sample",
            value=float(own[worst]),
            threshold=float(gaps[worst, other]),
        )
    middle, largest = float(own.median()), float(own.max())
    gap, limit = max(middle, largest / ANOTHER_WAY), WARN_FACTOR * usual
    message = (
        f"images differ by up to {largest:.2g} grey levels of 255 from the actor's of the same trajectories, half of "
        f"them by less than {middle:.2g}"
    )
    remedy = (
        "rewards score the engine's images; look at a few of them"
        if gap <= limit
        else "compare the VAEs, their scaling and shift, and the steps after the window"
    )
    return judged(gap, usual, message, message, remedy, fails_above=limit)


def find_exchanged(gaps: Tensor) -> tuple[int, int] | None:
    """The sample that most clearly has the image of another one, and that one.

    Args:
        gaps: `[B, B]`, mean absolute differences of the engine's image (row) from those of all samples' latents.

    Returns:
        None if every image belongs to its own sample, or to none.
    """
    own = gaps.diagonal()
    nearest, other = gaps.min(1)
    worst = int((own / nearest.clamp(min=IMAGE_ROUNDING)).argmax())
    usual = nearest.median().clamp(min=IMAGE_ROUNDING)
    closer = own[worst] > IMAGE_ROUNDING and nearest[worst] < SWAPPED * own[worst]
    return (worst, int(other[worst])) if closer and nearest[worst] <= CLOSE * usual else None


@torch.no_grad()
def _expected(exam: Exam) -> tuple[Tensor, Tensor, float]:
    """The actor's images `[B, H, W, 3]` float of the engine's trajectories, which are finite `[B]`, and the usual gap.

    That gap is measured: latents are decoded again with noise of the size that the precision of both sides causes in
    the steps after the window.
    """
    rollout, family = exam.trials.base.rollout, exam.actor.family
    members = rollout.num_samples // exam.trials.num_prompts
    images, known, shifts = [], [], []
    for member in range(members):  # one image of each prompt at a time, since all together may not fit
        rows = torch.arange(member, rollout.num_samples, members, device=rollout.window.latents.device)
        final = _continued(exam, rows, member)
        moved = (final - rollout.window.next_latents[rows, -1]).square().mean().sqrt()
        draw = torch.Generator().manual_seed(member)
        noise = torch.randn(final.shape, generator=draw).to(final)
        image, finite = decode(family, final)
        shifted, _ = decode(family, final + exam.usual_gap * moved * noise)
        shifts.append((shifted.float() - image.float()).abs().mean())
        images.append(image.float())
        known.append(finite)
    rounding = IMAGE_ROUNDING
    if {exam.config.model.dtype, exam.config.rollout.dtype} != {"float32"}:
        rounding += DECODER_ROUNDING
    # In the rollout's order, prompt by prompt.
    ordered, finite = (torch.stack(parts, 1).flatten(0, 1) for parts in (images, known))
    return ordered, finite, rounding + SMOOTH * float(torch.stack(shifts).max())


def _continued(exam: Exam, rows: Tensor, member: int) -> Tensor:
    """Final latents of the actor's steps from the last window latents of `rows`: the samples of one `member` index."""
    actor, schedule, sampling = exam.actor, exam.trials.schedule, exam.config.sampling
    rollout = exam.trials.base.rollout.select(rows)
    groups = rollout.group_ids.tolist()
    latents, ends = rollout.window.next_latents[:, -1].clone(), rollout.window.step_indices[:, -1]
    for index, timestep in enumerate(schedule.timesteps):
        active = (ends < index).nonzero().squeeze(1)
        if not len(active):
            continue
        velocity = actor.family.velocity(
            actor.weights.transformer,
            latents[active],
            latents.new_full((len(active),), timestep),
            rollout.select(active).sample_conditioning(),
            actor.guidance,
        )
        noise = None
        if index in sampling.noisy_steps:
            noise = sde.step_noise(
                latents.shape[1:],
                [groups[place] for place in active.tolist()],
                [member] * len(active),
                seed=exam.config.trainer.seed,
                training_step=TRAINING_STEP,
                step_index=index,
            ).to(latents.device)
        latents[active] = step_outside(
            latents[active], velocity, schedule.sigmas[index : index + 2], sampling, noise
        )
    return latents
