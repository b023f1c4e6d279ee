"""Checks that images are the decodings of their final latents."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from flowcorr.dumps.replay import ReplaySamples
from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.candidates import Candidate, Number, Tried, best, search
from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import failed, judged, passed, skipped, warned
from flowcorr.instruments.doctor.mistakes import configured, scalings
from flowcorr.models import DTYPES, ModelFamily
from flowcorr.questions.images import image_gaps
from flowcorr.questions.question import IMAGES_REMEDY
from flowcorr.rollout.precision import image_limit
from flowcorr.rollout.sampler import decode

IMAGE_ROUNDING = 0.5
# An image belongs to another sample where it is much closer to that one, and as close as images usually are to their
# own: a group's images are all alike.
SWAPPED = 0.5  # ratio of distances
CLOSE = 3.0  # times the usual distance
CUT = 0.5  # grey levels that a captured loop loses which cuts pixels to whole levels instead of rounding them
_UNSCALE = "divide latents by scaling_factor once and add shift_factor once, before the VAE decodes them"
_UNCHANGED = "hand the reward images as the pipeline returns them, before they are stored or adjusted"
_QUALITIES = (100, 95, 90, 85, 80, 75, 70, 60, 50, 40, 30)
Origin = Callable[[], Tensor]
"""Makes the images `[m, H, W, 3]`, or those of videos, that may have been captured."""


def check_images(exam: Exam) -> Finding:
    rollout = exam.trials.base.rollout
    if rollout.images is None or rollout.final_latents is None:
        return skipped("the engine returns no images, or no final latents to compare them with")
    expected, finite, rounding = _expected(exam.actor.family, rollout.final_latents, exam)
    if not bool(finite.all()):
        return failed(
            f"the actor decodes {int((~finite).sum())} of {len(finite)} images in float32 to pixels that are not "
            "finite, and the engine does not say so of its own",
            "the weights of the VAE are damaged: check the model's files, and return Rollout.finite_images",
            images=len(finite),
            not_finite=int((~finite).sum()),
        )
    captured = rollout.images.to(expected.device).float()
    if captured.shape != expected.shape:
        return failed(
            f"images are {list(captured.shape[1:])} in the engine and {list(expected.shape[1:])} here",
            "pass sampling.height, sampling.width and sampling.num_frames to the engine",
            engine_shape=list(captured.shape[1:]),
            actor_shape=list(expected.shape[1:]),
        )
    gaps = torch.stack([image_gaps(image, expected) for image in captured])
    own = gaps.diagonal()
    exchanged = find_exchanged(gaps)
    if exchanged is not None:
        worst, other = exchanged
        return failed(
            f"sample {worst} has the image of sample {other}: it differs by {float(gaps[worst, other]):.2g} "
            f"grey levels of 255 from that one, and by {float(own[worst]):.2g} from its own",
            "keep the order of samples in a batch: row i of images, latents and rewards must be the same sample",
            value=float(own[worst]),
            limit=float(gaps[worst, other]),
            sample=worst,
            has_image_of=other,
        )
    # In lower precision the limit is measured on the actor's decoder: in bfloat16 the embedded model's rounds by .2,
    # and JPEG of quality 95 changes 1.5.
    limit = image_limit("float32", rounding=rounding)
    largest, signed = float(own.max()), (captured - expected).flatten(0, -2).mean(0).tolist()
    message = (
        f"images differ by up to {largest:.2g} grey levels of 255 from the actor's of the same final latents, by "
        f"{', '.join(f'{level:+.2g}' for level in signed)} in the mean of red, green and blue; rounding explains "
        f"{limit:.2g}"
    )
    return judged(largest, limit, message, message, IMAGES_REMEDY)


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
        The images, which of them are finite `[B]`, and the largest error of one by the run's precision.
    """
    exact, finite = _decoded(family, final, torch.float32)
    dtypes = {DTYPES[name] for name in (exam.config.model.dtype, exam.config.rollout.dtype)} - {torch.float32}
    errors = [image_gaps(_decoded(family, final, dtype)[0], exact).max() for dtype in dtypes]
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


def check_captured_images(captured: Captured) -> Finding:
    stack = captured.stack
    final = stack.tensor("final_latents")
    if final is None:
        return skipped("cannot tell", "capture final_latents")
    images = _pixels(stack.samples)
    images_of, finite = decode(stack.family, final)
    if not bool(finite.all()):
        return skipped(
            "cannot tell: the captured latents decode to pixels that are not finite",
            "the VAE overflows in float16, or its weights are damaged: give --model a recipe of model.dtype: bfloat16, "
            "or check the model's files"
            if stack.family.dtype == torch.float16
            else "the weights of the VAE are damaged: check the model's files",
        )
    decoded = images_of.cpu().float()
    # Some decoders round more than the one of the table: Wan's applies the std of its latents in half precision.
    rounded, sound = _decoded(stack.family, final, DTYPES[stack.dtype])
    rounding = torch.where(sound.cpu(), image_gaps(rounded.cpu(), decoded), 0).max()
    dtypes = stack.dtype, str(stack.family.dtype).removeprefix("torch.")
    limit = CUT + image_limit(*dtypes, rounding=float(rounding))
    if (held := _frames(decoded, images, limit)) is not None or decoded.shape != images.shape:
        kept = "other frames" if held is None else f"its frames {', '.join(map(str, held))}"
        return failed(
            f"the images are not the whole video in order: of {decoded.shape[1]} decoded frames they are {kept}",
            "hand reward and capture all frames of a video, [B, F, H, W, 3], in order",
            cause="frames",
            confidence="likely" if held is None else "certain",
        )
    table = _distances(decoded, images) / limit  # [decoded, captured]
    own = table.diag()
    others = table + torch.diag(torch.full_like(own, torch.inf))
    evidence = f"{', '.join(f'{value:.2g}' for value in (own * limit).tolist())} grey levels"
    samples = tuple(own.tolist())
    if bool((own <= 1).all()):
        if len(own) > 1 and float(others.min()) <= 2:
            return skipped(f"cannot tell: images of different samples are alike; {evidence}", samples=samples)
        return passed(f"the images are those of their latents; {evidence}", samples=samples)
    bad = own > 1
    origin = best(
        search(
            _origins(captured, final, decoded, images),
            partial(_tried, images, limit, bad),
            lambda made: (made().double() - images).flatten(1),
        )
    )
    if origin is None:
        return warned(
            f"the images are not those of their latents, and cannot tell why; {evidence}",
            "an image of a sample that was not captured, or another decoder: capture all samples of a batch, and "
            "the step before",
            samples=samples,
        )
    count = int(((origin.score <= 1) & bad).sum())
    return failed(
        f"{origin.candidate.message}; {evidence}; with this undone {count} of {int(bad.sum())} agree",
        origin.candidate.remedy,
        cause=origin.candidate.cause,
        confidence="certain" if count == int(bad.sum()) else "likely",
        samples=samples,
    )


def _tried(images: Tensor, limit: float, bad: Tensor, candidate: Candidate[Origin]) -> Tried[Origin]:
    """The distances of the images from another origin, in units of the limit.

    Args:
        images: `[n, H, W, 3]`, or those of videos, as captured.
        limit: in grey levels.
        bad: `[n]` bool, the images that are not those of their latents.
        candidate: makes images in the same order, or of which each captured one may be any.
    """
    (origin,) = candidate.inputs
    table = _distances(origin(), images) / limit
    score = table.diag() if candidate.whole else table.amin(0)
    explained = (score <= 1) & bad
    every = bool((explained == bad).all())
    return Tried(
        candidate=candidate,
        score=score,
        left=float(score[bad].mean()),
        explains=every or (not candidate.whole and bool(explained.any())),
        exact=every and not candidate.fitted,
    )


def _origins(
    captured: Captured, final: Tensor, decoded: Tensor, images: Tensor
) -> Iterator[Candidate[Origin]]:
    """List the origins that the images may have, if they are not the decoded ones."""
    family = captured.stack.family
    yield Candidate(
        cause="swapped_images",
        message="the images are those of other samples",
        remedy="keep images, latents and rewards of a batch in one order",
        inputs=(lambda: decoded,),
        whole=False,
    )
    for number, samples in sorted(captured.earlier.items(), reverse=True):
        past = samples.tensors().get("final_latents")
        known = [_pixels(samples)]
        if past is not None and past[0].numel() == final[0].numel():
            known.append(_decode(family, past.reshape(-1, *final.shape[1:]).float().to(final.device)))
        same = [values for values in known if values.shape[1:] == images.shape[1:]]
        if same:
            yield Candidate(
                cause="images_of_step_before",
                message=f"the images are those of training step {number}",
                remedy="clear what holds the images before the next step samples",
                inputs=(partial(torch.cat, same),),
                whole=False,
            )
    for words, changes in scalings(family):
        yield Candidate(
            cause="decoder_unscaled",
            message=f"the latents were decoded {words}",
            remedy=_UNSCALE,
            inputs=(partial(_decode, family, final, **changes),),
        )
    last = captured.stack.tensor("latents")
    if last is not None and captured.stack.steps[-1] == len(captured.stack.captured.timesteps) - 1:
        yield Candidate(
            cause="decoded_early",
            message="the latents before the last step were decoded",
            remedy="decode the latents after the last step",
            inputs=(partial(_decode, family, last[:, -1]),),
        )
    offset = float((images - decoded).median())
    yield Candidate(
        cause="images_changed",
        message=f"the images are brighter by {offset:.3g} grey levels than the decoder's",
        remedy=_UNCHANGED,
        inputs=(lambda: (decoded + offset).clamp(0, 255),),
        fitted=True,
    )
    for quality in _QUALITIES if images.dim() == 4 else ():
        yield Candidate(
            cause="images_changed",
            message=f"the images went through JPEG of quality {quality}",
            remedy=_UNCHANGED,
            inputs=(partial(_as_jpeg, decoded, quality),),
        )
    for cause, message, axis in (
        ("channels_reversed", "red and blue of the images are exchanged", -1),
        ("flipped_images", "the images are upside down", -3),
    ):
        yield Candidate(
            cause=cause,
            message=message,
            remedy="hand the reward images as the pipeline returns them",
            inputs=(partial(decoded.flip, axis),),
        )
    own = getattr(family.pipeline.vae.config, "scaling_factor", None)
    if own:
        yield Candidate(
            cause="decoder_unscaled",
            message=f"the latents were decoded with the scaling factor {{value:.4g}}, where the VAE has {own:.4g}",
            remedy=_UNSCALE,
            number=Number(
                inputs=lambda factor: partial(_decode, family, final, scaling_factor=factor),
                starts=(own, own / 2, own * 2),
                low=own / 16,
                high=own * 16,
            ),
        )


def _decode(family: ModelFamily, latents: Tensor, **changes: Any) -> Tensor:
    """The images of `latents` by the VAE, with other numbers in its configuration."""
    with configured(family, changes):
        return decode(family, latents)[0].cpu().float()


def _frames(decoded: Tensor, images: Tensor, limit: float) -> list[int] | None:
    """Places of the captured frames among the decoded ones; None if all frames are there, in order."""
    if images.dim() != 5 or decoded.shape[2:] != images.shape[2:]:
        return None
    table = torch.stack(
        [(decoded - images[:, [place]]).abs().flatten(2).mean(2).amax(0) for place in range(images.shape[1])]
    )
    nearest, places = table.min(1)
    held: list[int] = places.tolist()
    return held if bool((nearest <= limit).all()) and held != list(range(decoded.shape[1])) else None


def _as_jpeg(images: Tensor, quality: int) -> Tensor:
    compressed = []
    for image in images.round().to(torch.uint8):
        file = io.BytesIO()
        Image.fromarray(image.numpy()).save(file, "JPEG", quality=quality)
        compressed.append(torch.from_numpy(np.array(Image.open(file))))
    return torch.stack(compressed).float()


def _pixels(samples: ReplaySamples) -> Tensor:
    assert isinstance(samples.images, Tensor)
    return samples.images.float()


def _distances(decoded: Tensor, images: Tensor) -> Tensor:
    """Mean absolute differences `[decoded, images]` in grey levels."""
    return torch.stack([image_gaps(images, one) for one in decoded])
