"""Adapters of tiny pipelines, right and wrong, and their comparison with the pipeline's own call."""

from dataclasses import replace

from tiny_pipelines import PIPELINES

from flowcorr.config import ModelConfig
from flowcorr.models import Guidance, Schedule, compare_with_pipeline, load_family
from tests.prompts import prompts_of

TEXTS = ["cat", "two dogs"]
LENGTH = {"sd3": 8, "sd35": 8, "qwen_image_edit": 96, "qwen_image_edit_plus": 96}
GUIDED = Guidance(guidance_scale=3.0, true_cfg_scale=3.0, negative_prompt="bad")


def load(folder, name, dtype="float32", **methods):
    """The family at a folder of a tiny pipeline, with other methods than its own."""
    model = ModelConfig(path=folder, dtype=dtype, max_sequence_length=LENGTH.get(name, 48))
    family = load_family(model, reference_size=PIPELINES[name].size)
    if methods:
        family.__class__ = type("Wrong", (type(family),), methods)
    return family


def compared(family, name, **options):
    tiny = PIPELINES[name]
    size = dict(zip(("height", "width"), tiny.size, strict=True))
    prompts = prompts_of(TEXTS, images=tiny.images)
    return compare_with_pipeline(family, prompts, GUIDED, **size, num_frames=tiny.frames, **options)


# Wrong adapters: of each, the methods of the family that are replaced, and the part that is to be named.


def with_timesteps(change):
    def schedule(self, num_inference_steps, latent_shape):
        right = super(type(self), self).schedule(num_inference_steps, latent_shape)
        return replace(right, timesteps=tuple(change(timestep) for timestep in right.timesteps))

    return {"schedule": schedule}


def with_inputs(**changes):
    """`predict` whose transformer gets other inputs."""

    def predict(self, transformer, latents, timesteps, conditioning, guidance):
        def call(**inputs):
            return transformer(**inputs | {name: change(inputs[name]) for name, change in changes.items()})

        return super(type(self), self).predict(call, latents, timesteps, conditioning, guidance)

    return {"predict": predict}


def with_conditioning(change):
    def embed(self, prompts, guidance):
        return change(super(type(self), self).embed(prompts, guidance))

    return {"embed": embed}


def with_guidance(**changes):
    """`embed` that gets other guidance."""

    def embed(self, prompts, guidance):
        return super(type(self), self).embed(prompts, replace(guidance, **changes))

    return {"embed": embed}


def with_steps(self, num_inference_steps, latent_shape):
    shifted = super(type(self), self).schedule(num_inference_steps, latent_shape)
    sigmas = tuple(sigma**1.01 for sigma in shifted.sigmas)
    return Schedule(sigmas=sigmas, timesteps=tuple(1000 * sigma for sigma in sigmas[:-1]))


def with_velocity(change):
    def predict(self, *inputs):
        return change(super(type(self), self).predict(*inputs))

    return {"predict": predict}


def with_decoding(before=lambda latents: latents, after=lambda pixels: pixels):
    def decode(self, latents):
        return after(super(type(self), self).decode(before(latents)))

    return {"decode": decode}
