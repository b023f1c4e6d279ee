"""Families on their tiny pipelines, and each pipeline's own call, which they have to repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tiny_pipelines import PIPELINES, Tiny
from torch import Tensor

from flowcorr.config import ModelConfig
from flowcorr.models import Guidance, load_family
from flowcorr.records import Prompt
from flowcorr.rollout import decode, sample_ode
from tests.prompts import prompts_of
from tests.tolerances import LATENTS, MEANS


@dataclass(kw_only=True, eq=False)
class PipelinesCall:
    """A pipeline's own call for one prompt, from noise to pixels.

    Attributes:
        sigmas: the scheduler's table.
        timesteps: of each step.
        latents: `[1, *L]` before each step, and after the last.
        velocities: `[1, *L]`, as the scheduler got them.
        pixels: `[1, H, W, 3]` or `[1, F, H, W, 3]`, 0 to 1.
    """

    sigmas: list[float] = field(default_factory=list)
    timesteps: list[float] = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)
    velocities: list[Tensor] = field(default_factory=list)
    pixels: Any = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A family on a tiny pipeline.

    Attributes:
        name: of the tiny pipeline.
        length: tokens of a prompt.
        shape: `L` at the size of the tiny pipeline.
        native: `L` at the native size.
        multiple: of heights and widths.
        adapter_tensors: tensors of an adapter on all targets.
        asked: `(prompt, guidance)` -> arguments of the pipeline's call that say both.
        given: noise `[1, *L]` as the pipeline takes it.
        guided: the usual guidance.
        texts: of two prompts.
        fewest_steps: of a schedule.
        rounds_timesteps: whether a transformer of lower precision rounds them.
        changes: to the row of the tiny pipeline.
    """

    name: str
    length: int
    shape: tuple[int, ...]
    native: tuple[int, ...]
    multiple: int
    adapter_tensors: int
    asked: Callable[[Prompt, Guidance], dict[str, Any]]
    given: Callable[[Tensor], Tensor]
    guided: Guidance
    texts: tuple[str, str] = ("cat", "two dogs")
    fewest_steps: int = 1
    rounds_timesteps: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tiny(self) -> Tiny:
        return replace(PIPELINES[self.name], **self.changes)

    @property
    def prompts(self) -> list[Prompt]:
        return prompts_of(self.texts, images=self.tiny.images)

    @property
    def size(self) -> dict[str, int]:
        """Keys of the size, of `sampling` and of the pipeline's call."""
        frames = {} if self.tiny.frames is None else {"num_frames": self.tiny.frames}
        return {**dict(zip(("height", "width"), self.tiny.size, strict=True)), **frames}

    def load(self, path: str, **keys: Any) -> Any:
        model = ModelConfig(path=path, max_sequence_length=self.length, **keys)
        return load_family(model, reference_size=self.tiny.size)

    def sections(self, path: str, **sampling: Any) -> dict[str, dict[str, Any]]:
        """Sections of a configuration of short trajectories."""
        steps = {"num_inference_steps": 5, "sde_window_size": 3, "sde_window_range": (0, 4)}
        guidance = {**self.tiny.guidance, "negative_prompt": self.guided.negative_prompt}
        return {
            "model": {"path": path, "max_sequence_length": self.length},
            "sampling": {**self.size, **steps, **guidance, **sampling},
            "rollout": {"prompts_per_step": 2, "n": 2},
            "actor": {"mini_batches": 1, "lr": 1e-3},
        }

    def noise(self, batch: int = 2) -> Tensor:
        return torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(0))

    def call(
        self, pipeline: Any, prompt: Prompt, guidance: Guidance, noise: Tensor, num_steps: int, **options: Any
    ) -> PipelinesCall:
        """The pipeline's own call.

        Args:
            pipeline: of the case.
            prompt: drawn alone.
            guidance: of the call.
            noise: `[1, *L]`, the latents before the first step.
            num_steps: of the schedule.
            options: further arguments; `along` are latents `[1, *L]` by step, from which these steps start.
        """
        along, call = options.pop("along", {}), PipelinesCall()
        scheduler = pipeline.scheduler
        own = scheduler.step

        def step(velocity: Tensor, timestep: Tensor, sample: Tensor, **arguments: Any) -> tuple[Tensor]:
            call.timesteps.append(float(timestep))
            call.latents.append(sample.reshape(1, *self.shape))
            call.velocities.append(velocity.reshape(1, *self.shape))
            after = own(velocity, timestep, sample, **arguments)[0]
            after = along.get(len(call.latents), after).reshape(sample.shape)
            if len(call.latents) == num_steps:
                call.latents.append(after.reshape(1, *self.shape))
            return (after,)

        asked = {
            "prompt": prompt.text,
            "latents": self.given(along.get(0, noise)),
            "num_inference_steps": num_steps,
            "max_sequence_length": self.length,
            "output_type": "np",
            **self.size,
            **self.asked(prompt, guidance),
            **options,
        }
        scheduler.step = step
        try:
            drawn = pipeline(**{name: value for name, value in asked.items() if value is not None})
        finally:
            del scheduler.step
        call.sigmas = scheduler.sigmas.tolist()
        call.pixels = drawn.frames if self.tiny.frames else drawn.images
        return call


@torch.no_grad()
def assert_is_the_pipelines_own_call(case: Case, family: Any, guidance: Guidance, num_steps: int) -> None:
    """Compare schedule, velocities in one forward pass of both prompts, final latents and images."""
    prompts, noise = case.prompts, case.noise()
    calls = [
        case.call(family.pipeline, prompt, guidance, row, num_steps)
        for prompt, row in zip(prompts, noise.split(1), strict=True)
    ]
    schedule = family.schedule(num_steps, case.shape)
    for call in calls:
        torch.testing.assert_close(schedule.sigmas, tuple(call.sigmas), rtol=0, atol=1e-7)
        torch.testing.assert_close(schedule.timesteps, tuple(call.timesteps), rtol=0, atol=1e-4)
    conditioning, passes = family.encode(prompts, guidance), []

    def velocity(latents: Tensor, timesteps: Tensor) -> Tensor:
        return family.velocity(family.transformer, latents, timesteps, conditioning, guidance)

    hook = family.transformer.register_forward_hook(lambda *_: passes.append(1))
    for step in range(num_steps):
        places = [(call, (step + row) % num_steps) for row, call in enumerate(calls)]
        timesteps = torch.tensor([call.timesteps[place] for call, place in places])
        got = velocity(torch.cat([call.latents[place] for call, place in places]), timesteps)
        torch.testing.assert_close(
            got, torch.cat([call.velocities[place] for call, place in places]), **MEANS
        )
        assert got.std() > 0.1
    hook.remove()
    assert len(passes) == num_steps
    final = torch.cat([call.latents[-1] for call in calls])
    torch.testing.assert_close(sample_ode(velocity, noise, schedule), final, **LATENTS)
    images, finite = decode(family, final)
    pixels = torch.cat([torch.as_tensor(call.pixels) for call in calls])
    assert images.shape == pixels.shape
    assert images.dtype == torch.uint8
    assert finite.all()
    assert (images - pixels * 255).abs().max() <= 0.51
    assert images.float().std() > 5


def as_it_is(noise: Tensor) -> Tensor:
    return noise


def as_tokens(noise: Tensor) -> Tensor:
    return noise.flatten(1, 2)


def as_channels(noise: Tensor) -> Tensor:
    return noise.permute(0, 3, 1, 2)


def by_guidance_scale(prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
    return {"guidance_scale": guidance.guidance_scale}


def beside_negative(prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
    return {"guidance_scale": guidance.guidance_scale, "negative_prompt": guidance.negative_prompt}


def counted_from_zero(prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
    return {"guidance_scale": guidance.guidance_scale - 1, "negative_prompt": guidance.negative_prompt}


def by_true_cfg(prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
    negative = guidance.negative_prompt if guidance.true_cfg_scale > 1 else None
    return {"true_cfg_scale": guidance.true_cfg_scale, "negative_prompt": negative}


def beside_references(prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
    images = [image.fitted(*KLEIN_EDIT.tiny.size) for image in prompt.images]
    return by_guidance_scale(prompt, guidance) | {"image": images}


def kontext(prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
    height, width = KONTEXT.tiny.size
    (image,) = prompt.images
    own = {"image": image.fitted(height, width), "_auto_resize": False, "max_area": height * width}
    return by_guidance_scale(prompt, guidance) | own


def qwen_edit(prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
    """Images of a megapixel, in the proportions of the image that is drawn: 832 x 1248."""
    images = [image.fitted(832, 1248) for image in prompt.images]
    own = {"image": images if len(images) > 1 else images[0], "max_sequence_length": None}
    return by_true_cfg(prompt, guidance) | own


SD3 = Case(
    name="sd3",
    length=8,
    shape=(4, 8, 8),
    native=(4, 16, 16),
    multiple=8,
    adapter_tensors=2 * (3 * 8 + 7),  # (A, B) of the blocks' targets; the last block has no `to_add_out`
    asked=beside_negative,
    given=as_it_is,
    guided=Guidance(guidance_scale=3.0, negative_prompt="bad"),
    rounds_timesteps=False,
)
FLUX = Case(
    name="flux",
    length=12,
    shape=(4, 6, 16),
    native=(64, 64, 16),
    multiple=4,
    adapter_tensors=2 * (12 + 3),  # (A, B) of a double block's targets and a single block's
    asked=by_guidance_scale,
    given=as_tokens,
    guided=Guidance(guidance_scale=3.5),
)
KONTEXT = replace(FLUX, name="flux_kontext", asked=kontext)
KLEIN = replace(
    FLUX,
    name="flux2_klein",
    length=32,
    adapter_tensors=2 * (12 + 1),
    given=as_channels,
    guided=Guidance(guidance_scale=3.0),
)
KLEIN_EDIT = replace(
    KLEIN,
    asked=beside_references,
    shape=(16, 24, 16),
    changes={"images": 2, "size": (64, 96)},  # the smallest reference images that the pipeline takes
)
OVIS = replace(FLUX, name="ovis_image", length=24, asked=beside_negative, guided=SD3.guided)
QWEN = replace(
    FLUX,
    name="qwen_image",
    length=24,
    multiple=8,
    adapter_tensors=2 * 2 * 12,  # blocks x (A, B) x targets
    asked=by_true_cfg,
    guided=Guidance(true_cfg_scale=3.0, negative_prompt="bad"),
    fewest_steps=2,
)
QWEN_EDIT = replace(
    QWEN,
    name="qwen_image_edit",
    length=96,
    shape=(2, 3, 16),
    native=(64, 64, 16),
    multiple=32,
    asked=qwen_edit,
)
QWEN_EDIT_PLUS = replace(QWEN_EDIT, name="qwen_image_edit_plus")
Z_IMAGE = replace(
    SD3,
    name="z_image",
    length=48,
    shape=(4, 8, 12),  # 24 patches: no multiple of 32, so that the transformer pads images as well
    native=(4, 512, 512),
    multiple=4,
    adapter_tensors=2 * 7 * 4,  # (A, B) of the targets of two layers and two refiners
    asked=counted_from_zero,
    texts=("cat", "two dogs on a very long sofa"),  # 17 and 38 tokens: padded to 32 and to 64
)
WAN = replace(
    SD3,
    name="wan",
    length=12,
    shape=(16, 3, 4, 6),
    native=(16, 21, 60, 104),  # 480 x 832, 81 frames
    multiple=16,
    adapter_tensors=2 * 2 * 8,  # blocks x (A, B) x targets
)
WAN22 = replace(WAN, name="wan22_ti2v", shape=(48, 3, 4, 6), native=(48, 21, 30, 52), multiple=32)

CASES = {
    case.name + ("_edit" if case is KLEIN_EDIT else ""): case
    for case in (
        *(SD3, FLUX, KONTEXT, KLEIN, KLEIN_EDIT, OVIS),
        *(QWEN, QWEN_EDIT, QWEN_EDIT_PLUS, Z_IMAGE, WAN, WAN22),
    )
}
