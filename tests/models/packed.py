"""Families whose latents are packed into tokens: tiny pipelines of their own classes, and the calls of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux import pipeline_flux, pipeline_flux_kontext
from diffusers.pipelines.ovis_image import pipeline_ovis_image
from diffusers.pipelines.qwenimage import pipeline_qwenimage
from tiny_pipelines import (
    FLUX_SIZE,
    OVIS_IMAGE_SIZE,
    QWEN_SIZE,
    build_tiny_flux,
    build_tiny_flux_kontext,
    build_tiny_ovis_image,
    build_tiny_qwen_image,
)

from flowcorr.config import ModelConfig
from flowcorr.models import Guidance, load_family
from flowcorr.records import Prompt
from flowcorr.rollout import sample_ode
from tests.prompts import prompts_of
from tests.tolerances import LATENTS, MEANS

SHAPE = (4, 6, 16)
PROMPTS = ["cat", "two dogs"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """A family, and the calls of its pipeline in diffusers.

    Attributes:
        name: of the family.
        build: writes its tiny pipeline.
        size: height and width of its images.
        length: tokens of a prompt.
        guidances: with which it is tried; the last is the usual one.
        sampling: the keys of `sampling` that ask for the usual guidance.
        multiple: what heights and widths are multiples of.
        adapter_tensors: tensors of an adapter on all targets.
        pipeline: the module of its pipeline.
        velocity: `(pipe, latents, timestep, prompt, guidance)` -> the velocity of one prompt alone.
        call: arguments of the pipeline's call, from the prompts and the guidance.
        unscale: `(vae, latents)` -> what the VAE decodes.
        images: reference images of a prompt.
    """

    name: str
    build: Callable[[Path], Path]
    size: tuple[int, int]
    length: int
    guidances: tuple[Guidance, ...]
    sampling: dict[str, Any]
    multiple: int
    adapter_tensors: int
    pipeline: ModuleType
    velocity: Callable[..., torch.Tensor]
    call: Callable[[list[Prompt], Guidance], dict[str, Any]]
    unscale: Callable[..., torch.Tensor]
    images: int = 0

    @property
    def prompts(self) -> list[Prompt]:
        return prompts_of(PROMPTS, images=self.images)

    @property
    def guidance(self) -> Guidance:
        return self.guidances[-1]

    def load(self, path: str, **keys: Any) -> Any:
        model = ModelConfig(path=path, max_sequence_length=self.length, **keys)
        return load_family(model, reference_size=self.size)

    def sections(self, path: str, **sampling: Any) -> dict[str, dict[str, Any]]:
        """Sections of a configuration of short trajectories."""
        height, width = self.size
        steps = {"num_inference_steps": 5, "sde_window_size": 3, "sde_window_range": (0, 4)}
        return {
            "model": {"path": path, "max_sequence_length": self.length},
            "sampling": {"height": height, "width": width, **steps, **self.sampling, **sampling},
            "rollout": {"prompts_per_step": 2, "n": 2},
            "actor": {"mini_batches": 1, "lr": 1e-3},
        }

    def schedule(self, pipe: Any, steps: int, tokens: int) -> tuple[list[float], list[float]]:
        """Sigmas and timesteps with the calls that the pipeline's `__call__` makes."""
        config = pipe.scheduler.config
        mu = self.pipeline.calculate_shift(
            tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
        timesteps, _ = self.pipeline.retrieve_timesteps(
            pipe.scheduler, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu
        )
        return pipe.scheduler.sigmas.tolist(), timesteps.tolist()


def noise(seed: int = 0, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def assert_velocity_is_the_pipelines(packed: Packed, family: Any, guidance: Guidance) -> None:
    """In one forward for all prompts."""
    latents, timesteps, calls = noise(), torch.tensor([912.5, 303.0]), []
    conditioning = family.encode(packed.prompts, guidance)
    hook = family.transformer.register_forward_hook(lambda *_: calls.append(1))
    got = family.velocity(family.transformer, latents, timesteps, conditioning, guidance)
    hook.remove()
    assert len(calls) == 1
    for row, prompt in enumerate(packed.prompts):
        expected = packed.velocity(family.pipeline, latents[row], timesteps[row].item(), prompt, guidance)
        torch.testing.assert_close(got[row : row + 1], expected, **MEANS)
    assert got.std() > 0.1


def assert_ode_is_the_pipelines(packed: Packed, family: Any, guidance: Guidance) -> None:
    conditioning = family.encode(packed.prompts, guidance)
    got = sample_ode(
        lambda latents, timesteps: family.velocity(
            family.transformer, latents, timesteps, conditioning, guidance
        ),
        noise(),
        family.schedule(4, SHAPE),
    )
    expected = family.pipeline(
        prompt=[prompt.text for prompt in packed.prompts],
        **packed.call(packed.prompts, guidance),
        height=packed.size[0],
        width=packed.size[1],
        num_inference_steps=4,
        latents=noise().flatten(1, 2),
        max_sequence_length=packed.length,
        output_type="latent",
    ).images
    torch.testing.assert_close(got.flatten(1, 2), expected, **LATENTS)


# FLUX -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def flux_velocity(pipe, latents, timestep, prompt, guidance):
    """With the pipeline's own position ids."""
    embeds, pooled, text_ids = pipe.encode_prompt([prompt.text], None, max_sequence_length=FLUX.length)
    _, image_ids = pipe.prepare_latents(
        1, SHAPE[-1] // 4, *FLUX.size, embeds.dtype, "cpu", None, latents.reshape(1, -1, SHAPE[-1])
    )
    scale = torch.tensor([guidance.guidance_scale]) if pipe.transformer.config.guidance_embeds else None
    return pipe.transformer(
        hidden_states=latents.reshape(1, -1, SHAPE[-1]),
        timestep=torch.tensor([timestep]) / 1000,
        guidance=scale,
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=image_ids,
        return_dict=False,
    )[0].reshape(1, *SHAPE)


FLUX = Packed(
    name="flux",
    build=build_tiny_flux,
    size=FLUX_SIZE,
    length=12,
    guidances=(Guidance(guidance_scale=3.5),),
    sampling={"guidance_scale": 3.5},
    multiple=4,
    adapter_tensors=2 * (12 + 3),  # (A, B) of a double block's targets and a single block's
    pipeline=pipeline_flux,
    velocity=flux_velocity,
    call=lambda prompts, guidance: {"guidance_scale": guidance.guidance_scale},
    unscale=lambda vae, latents: latents / vae.config.scaling_factor + vae.config.shift_factor,
)

# FLUX.1 Kontext -------------------------------------------------------------------------------------------


def kontext_image(prompt):
    """The reference at the size that is drawn, for the pipeline."""
    (image,) = prompt.images
    return image.fitted(*KONTEXT.size)


@torch.no_grad()
def kontext_velocity(pipe, latents, timestep, prompt, guidance):
    """With the pipeline's own latents and position ids of the reference."""
    embeds, pooled, text_ids = pipe.encode_prompt([prompt.text], None, max_sequence_length=KONTEXT.length)
    pixels = pipe.image_processor.preprocess(kontext_image(prompt))
    packed = latents.reshape(1, -1, SHAPE[-1])
    _, reference, image_ids, reference_ids = pipe.prepare_latents(
        pixels, 1, SHAPE[-1] // 4, *KONTEXT.size, embeds.dtype, "cpu", None, packed
    )
    return pipe.transformer(
        hidden_states=torch.cat([packed, reference], dim=1),
        timestep=torch.tensor([timestep]) / 1000,
        guidance=torch.tensor([guidance.guidance_scale]),
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=torch.cat([image_ids, reference_ids]),
        return_dict=False,
    )[0][:, : packed.shape[1]].reshape(1, *SHAPE)


KONTEXT = replace(
    FLUX,
    name="flux_kontext",
    build=build_tiny_flux_kontext,
    pipeline=pipeline_flux_kontext,
    velocity=kontext_velocity,
    call=lambda prompts, guidance: {
        "image": [kontext_image(prompt) for prompt in prompts],
        "_auto_resize": False,
        "max_area": KONTEXT.size[0] * KONTEXT.size[1],
        "guidance_scale": guidance.guidance_scale,
    },
    images=1,
)

# Ovis-Image -----------------------------------------------------------------------------------------------


@torch.no_grad()
def ovis_velocity(pipe, latents, timestep, prompt, guidance):
    """With the pipeline's own position ids, the two halves of guidance one after the other."""
    _, image_ids = pipe.prepare_latents(
        1, SHAPE[-1] // 4, *OVIS.size, torch.float32, "cpu", None, latents.reshape(1, -1, SHAPE[-1])
    )
    embeds, negative, text_ids, _ = pipe.encode_prompt(
        [prompt.text], negative_prompt=guidance.negative_prompt, max_sequence_length=OVIS.length
    )

    def predict(text):
        return pipe.transformer(
            hidden_states=latents.reshape(1, -1, SHAPE[-1]),
            timestep=torch.tensor([timestep]) / 1000,
            encoder_hidden_states=text,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]

    velocity = predict(embeds)
    if guidance.guidance_scale > 1:
        without = predict(negative)
        velocity = without + guidance.guidance_scale * (velocity - without)
    return velocity.reshape(1, *SHAPE)


OVIS = Packed(
    name="ovis_image",
    build=build_tiny_ovis_image,
    size=OVIS_IMAGE_SIZE,
    length=24,
    guidances=(Guidance(), Guidance(guidance_scale=3.0, negative_prompt="bad")),
    sampling={"guidance_scale": 3.0, "negative_prompt": "bad"},
    multiple=4,
    adapter_tensors=2 * (12 + 3),  # (A, B) of a double block's targets and a single block's
    pipeline=pipeline_ovis_image,
    velocity=ovis_velocity,
    call=lambda prompts, guidance: {
        "guidance_scale": guidance.guidance_scale,
        "negative_prompt": 2 * [guidance.negative_prompt],
    },
    unscale=lambda vae, latents: latents / vae.config.scaling_factor + vae.config.shift_factor,
)

# Qwen-Image -----------------------------------------------------------------------------------------------


@torch.no_grad()
def qwen_velocity(pipe, latents, timestep, prompt, guidance):
    """Without padding, the two halves of guidance one after the other, as in the pipeline."""

    def predict(text):
        embeds, mask = pipe.encode_prompt([text], max_sequence_length=QWEN.length)
        return pipe.transformer(
            hidden_states=latents.reshape(1, -1, SHAPE[-1]),
            timestep=torch.tensor([timestep]) / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *SHAPE[:2])]],
            return_dict=False,
        )[0]

    positive = predict(prompt.text)
    if guidance.true_cfg_scale > 1:
        negative = predict(guidance.negative_prompt)
        combined = negative + guidance.true_cfg_scale * (positive - negative)
        positive = combined * (
            torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
        )
    return positive.reshape(1, *SHAPE)


def qwen_call(prompts, guidance):
    negative = ["bad", "bad"] if guidance.true_cfg_scale > 1 else None
    return {"negative_prompt": negative, "true_cfg_scale": guidance.true_cfg_scale}


def qwen_unscale(vae, latents):
    mean, std = (
        torch.tensor(values).view(1, 4, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return latents / (1 / std) + mean


QWEN = Packed(
    name="qwen_image",
    build=build_tiny_qwen_image,
    size=QWEN_SIZE,
    length=24,
    guidances=(Guidance(), Guidance(true_cfg_scale=3.0, negative_prompt="bad")),
    sampling={"true_cfg_scale": 3.0, "negative_prompt": "bad"},
    multiple=8,
    adapter_tensors=2 * 2 * 12,  # blocks x (A, B) x targets
    pipeline=pipeline_qwenimage,
    velocity=qwen_velocity,
    call=qwen_call,
    unscale=qwen_unscale,
)
