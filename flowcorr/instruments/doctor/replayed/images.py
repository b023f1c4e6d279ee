"""Are captured images those of the captured latents, and captured rewards those of the images?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from flowcorr.config.schema import Config
from flowcorr.data import load_prompts
from flowcorr.dumps.replay import ReplaySamples
from flowcorr.errors import BackendError, BatchError
from flowcorr.instruments.doctor.replayed.stack import Stack
from flowcorr.instruments.doctor.replayed.verdicts import Verdict
from flowcorr.models import ModelFamily
from flowcorr.records import Prompt
from flowcorr.rewards import build_reward, score_batch
from flowcorr.rollout import decode
from flowcorr.texts import folded

# Grey levels of 255: float32 decoders agree to the rounding to whole levels, and those of half precision to this.
_LIMITS = {"float32": 1.0, "float16": 2.0, "bfloat16": 4.0}
_REWARD_LIMIT = 0.1  # standard deviations of the scores, as the health rule `replay_reward`


def examine_images(stack: Stack, step: int, earlier: Mapping[int, ReplaySamples]) -> Verdict:
    """Whether images are what the training stack decodes of their final latents.

    Args:
        stack: the model with the samples.
        step: their training step.
        earlier: captured samples of earlier training steps, whose images may have been taken.
    """
    final = stack.tensor("final_latents")
    if final is None:
        return Verdict(
            part="decode", status="SKIP", step=step, message="cannot tell", remedy="capture final_latents"
        )
    images = _pixels(stack.samples)
    limit = _LIMITS[stack.samples.dtype or "bfloat16"]
    images_of, finite = decode(stack.family, final)
    if not bool(finite.all()):
        return Verdict(
            part="decode",
            status="SKIP",
            step=step,
            message="cannot tell: the captured latents decode to pixels that are not finite",
            remedy="the VAE overflows in the dtype of this replay, or its weights are damaged: give --model a recipe "
            "of model.dtype: float32, or check the model's files",
        )
    decoded = images_of.cpu().float()
    table = _distances(decoded, images) / limit  # [decoded, captured]
    own = table.diag()
    others = table + torch.diag(torch.full_like(own, torch.inf))
    evidence = f"{', '.join(f'{value:.2g}' for value in (own * limit).tolist())} grey levels"
    samples = tuple(own.tolist())
    if bool((own <= 1).all()):
        if len(own) > 1 and float(others.min()) <= 2:
            return Verdict(
                part="decode",
                status="SKIP",
                step=step,
                message="cannot tell: images of different samples are alike",
                evidence=evidence,
                samples=samples,
            )
        return Verdict(
            part="decode",
            status="PASS",
            step=step,
            message="the images are those of their latents",
            evidence=evidence,
            samples=samples,
        )
    bad = own > 1
    for cause, message, remedy, found in _rivals(stack, step, final, decoded, images, earlier):
        explained = (found / limit <= 1) & bad
        if bool((explained == bad).all()) or (cause in _BY_SAMPLE and bool(explained.any())):
            count = int(explained.sum())
            return Verdict(
                part="decode",
                status="FAIL",
                step=step,
                cause=cause,
                confidence="certain" if count == int(bad.sum()) else "likely",
                message=message,
                evidence=f"{evidence}; with this undone {count} of {int(bad.sum())} agree",
                samples=samples,
                remedy=remedy,
            )
    return Verdict(
        part="decode",
        status="WARN",
        step=step,
        message="the images are not those of their latents, and cannot tell why",
        evidence=evidence,
        samples=samples,
        remedy="an image of a sample that was not captured, or another decoder: capture all samples of a batch, and "
        "the step before",
    )


_BY_SAMPLE = ("swapped_images", "images_of_step_before")


def _rivals(
    stack: Stack,
    step: int,
    final: Tensor,
    decoded: Tensor,
    images: Tensor,
    earlier: Mapping[int, ReplaySamples],
) -> Iterator[tuple[str, str, str, Tensor]]:
    """What the images may be instead: cause, message, remedy, and the distance `[n]` of each image from that."""
    table = _distances(decoded, images)
    table.fill_diagonal_(torch.inf)
    yield (
        "swapped_images",
        "the images are those of other samples",
        "keep images, latents and rewards of a batch in one order",
        table.amin(0),
    )
    for number, samples in sorted(earlier.items(), reverse=True):
        past = samples.tensors().get("final_latents")
        known = [_pixels(samples)]
        if past is not None and past[0].numel() == final[0].numel():
            latents = past.reshape(-1, *final.shape[1:]).float().to(final.device)
            known.append(decode(stack.family, latents)[0].cpu().float())
        same = [values for values in known if values.shape[1:] == images.shape[1:]]
        if same:
            yield (
                "images_of_step_before",
                f"the images are those of training step {number}",
                "clear what holds the images before the next step samples",
                torch.stack([_distances(values, images).amin(0) for values in same]).amin(0),
            )
    with _without_scaling(stack.family) as changed:
        if changed:
            plain = decode(stack.family, final)[0].cpu().float()
            yield (
                "decoder_unscaled",
                "the latents were decoded without the VAE's scaling and shift",
                "divide latents by scaling_factor and add shift_factor before the VAE decodes them",
                _distances(plain, images).diag(),
            )
    for cause, message, other in (
        ("channels_reversed", "red and blue of the images are exchanged", decoded.flip(3)),
        ("flipped_images", "the images are upside down", decoded.flip(1)),
    ):
        yield (
            cause,
            message,
            "hand the reward images as the pipeline returns them",
            _distances(other, images).diag(),
        )


def _pixels(samples: ReplaySamples) -> Tensor:
    assert isinstance(samples.images, Tensor)
    return samples.images.float()


def _distances(decoded: Tensor, images: Tensor) -> Tensor:
    """Mean absolute differences `[decoded, images]` in grey levels."""
    return torch.stack([(images - one).abs().flatten(1).mean(1) for one in decoded])


@contextmanager
def _without_scaling(family: ModelFamily) -> Iterator[bool]:
    """The VAE as if its latents needed no scaling; false where it has no such numbers."""
    vae = family.pipeline.vae
    known = {
        name: value
        for name, value in (("scaling_factor", 1.0), ("shift_factor", 0.0))
        if getattr(vae.config, name, None)
    }
    before = {name: getattr(vae.config, name) for name in known}
    vae.register_to_config(**known)
    try:
        yield before != known
    finally:
        vae.register_to_config(**before)


def examine_reward(samples: ReplaySamples, config: Config | None, step: int) -> Verdict:
    """Whether the recipe's reward gives the captured images their scores again."""
    rewards = samples.tensors().get("rewards")

    def unknown(remedy: str, reason: str = "") -> Verdict:
        message = f"cannot tell: {reason}" if reason else "cannot tell"
        return Verdict(part="reward", status="SKIP", step=step, message=message, remedy=remedy)

    if rewards is None:
        return unknown("capture rewards")
    if config is None:
        return unknown("give --model a recipe, whose reward scores the images")
    data = load_prompts(config.data)
    known = {folded(prompt.text): prompt for prompt in (*data.heldout, *data.train)}
    others = [text for text in samples.prompts if folded(text) not in known]
    remedy = "give --model the recipe and the prompts that the run had"
    if others and any(term.tags for term in config.reward.terms):
        return unknown(
            remedy, f"the recipe's data has no prompt {others[0]!r}, whose tag chooses the rewards"
        )
    prompts = [known.get(folded(text), Prompt(text=text)) for text in samples.prompts]
    reward = build_reward(config.reward.terms, timeout=config.reward.timeout)
    assert isinstance(samples.images, Tensor)
    try:
        again, _ = score_batch(reward, samples.images.numpy(), prompts)
    except (BatchError, BackendError) as error:
        return unknown(remedy, str(error))
    spread = float(np.nanstd([*rewards.tolist(), *again.scores])) or 1.0
    gaps = np.abs(again.scores - rewards.double().numpy()) / spread / _REWARD_LIMIT
    agrees = bool((gaps <= 1).all())
    return Verdict(
        part="reward",
        status="PASS" if agrees else "WARN",
        step=step,
        message="the recipe's reward gives the images these scores"
        if agrees
        else "the recipe's reward gives the images other scores, and cannot tell why",
        evidence=f"{', '.join(f'{value:.3g}' for value in rewards.tolist())} captured, "
        f"{', '.join(f'{value:.3g}' for value in again.scores)} now",
        samples=tuple(gaps.tolist()),
        remedy=""
        if agrees
        else "compare the order of images, their channels and size, and the unit of the reward",
    )
