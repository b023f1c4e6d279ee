"""The check of the images: are they those of their final latents?"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import Finding, failed, judged, skipped
from flowcorr.models import DTYPES, ModelFamily
from flowcorr.rollout.sampler import decode

# Grey levels of 255. Images are whole levels, of which kernels of float32 move few. In lower precision the limit is
# measured on the actor's decoder: in bfloat16 the embedded model's rounds by .2, and JPEG of quality 95 changes 1.5.
SAME_IMAGE = 0.1
MARGIN = 2.0
WARN_MARGIN = 1.25
IMAGE_ROUNDING = 0.5
# An image belongs to another sample where it is much closer to that one, and as close as images usually are to their
# own: a group's images are all alike.
SWAPPED = 0.5  # ratio of distances
CLOSE = 3.0  # times the usual distance


def check_images(exam: Exam) -> Finding:
    """Whether each image is that of its own final latents, as the actor decodes them."""
    rollout = exam.trials.base.rollout
    if rollout.images is None or rollout.final_latents is None:
        return skipped("the engine returns no images, or no final latents to compare them with")
    expected, finite, rounding = _expected(exam.actor.family, rollout.final_latents, exam)
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
    limit = SAME_IMAGE + MARGIN * rounding
    largest, signed = float(own.max()), (found - expected).mean((0, 1, 2)).tolist()
    message = (
        f"images differ by up to {largest:.2g} grey levels of 255 from the actor's of the same final latents, by "
        f"{', '.join(f'{level:+.2g}' for level in signed)} in the mean of red, green and blue; rounding explains "
        f"{limit:.2g}"
    )
    return judged(
        largest,
        limit,
        message,
        message,
        "compare the VAEs, their scaling and shift, their tiling, the order of channels, and what encodes or resizes "
        "images on their way; rewards score the engine's images",
        fails_above=WARN_MARGIN * limit,
    )


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
def _expected(family: ModelFamily, final: Tensor, exam: Exam) -> tuple[Tensor, Tensor, float]:
    """Decode `final` latents in float32.

    Returns:
        The images `[B, H, W, 3]`, which of them are finite `[B]`, and the largest error of one by the run's precision.
    """
    exact, finite = _decoded(family, final, torch.float32)
    dtypes = {DTYPES[name] for name in (exam.config.model.dtype, exam.config.rollout.dtype)} - {torch.float32}
    errors = [(_decoded(family, final, dtype)[0] - exact).abs().flatten(1).mean(1).max() for dtype in dtypes]
    return exact, finite, max((float(error) for error in errors), default=0.0)


def _decoded(family: ModelFamily, final: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The images of `final` latents by the actor's VAE in `dtype`, and which of them are finite `[B]`."""
    vae = family.pipeline.vae
    if vae.dtype != dtype:
        family.pipeline.vae = nn.Module.to(copy.deepcopy(vae), dtype)  # that of diffusers warns of a dtype
    try:
        images, finite = decode(family, final)
    finally:
        family.pipeline.vae = vae
    return images.float(), finite
