"""A model family of your own: AuraFlow, which flowcorr does not know, in five methods.

    python examples/new_model.py fal/AuraFlow-v0.3      # is the adapter right?
    PYTHONPATH=examples flowcorr train RECIPE model.path=fal/AuraFlow-v0.3 model.family=new_model:AuraFlow

An adapter says what its pipeline does between the prompt and the velocity, and nothing about training. Read the
pipeline's `__call__` from top to bottom and put each part into its method; `check` then compares the two.
"""

import argparse

import torch

from flowcorr.config import ModelConfig
from flowcorr.models import Guidance, ModelFamily, Schedule, load_family
from flowcorr.models.base import check_size, guided, with_negative
from flowcorr.rollout import sample_ode


class AuraFlow(ModelFamily):
    """`AuraFlowPipeline`; guidance is on above `guidance_scale` 1."""

    name = "aura_flow"
    pipeline_class = "AuraFlowPipeline"
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    default_text_tokens = 256

    def latent_shape(self, height, width):
        factor, config = self.pipeline.vae_scale_factor, self.transformer.config
        height, width = height or config.sample_size * factor, width or config.sample_size * factor
        check_size(height, width, 2 * factor)
        return (config.in_channels, height // factor, width // factor)

    def schedule(self, num_inference_steps, latent_shape):
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        scheduler.set_timesteps(num_inference_steps)
        # What `velocity` gets: the pipeline feeds the scheduler's timesteps divided by 1000.
        timesteps = (scheduler.timesteps / 1000).tolist()
        return Schedule(sigmas=tuple(scheduler.sigmas.tolist()), timesteps=tuple(timesteps))

    @torch.no_grad()
    def embed(self, prompts, guidance):
        is_guided = guidance.guidance_scale > 1
        embeds, _, negative, _ = self.pipeline.encode_prompt(
            list(prompts),
            [guidance.negative_prompt] * len(prompts),
            do_classifier_free_guidance=is_guided,
            max_sequence_length=self.text_tokens,
        )
        # One row a prompt, whatever else is in the batch: these tensors are cached and put together anew. Prompts of
        # different lengths are padded to one length beside a mask, as in flowcorr/models/z_image.py.
        return {"embeds": embeds} | ({"negative_embeds": negative} if is_guided else {})

    def velocity(self, transformer, latents, timesteps, conditioning, guidance):
        is_guided = guidance.guidance_scale > 1
        if is_guided:
            # Twice the batch, in one forward pass: a tensor `negative_x` stands for the `x` of the negative prompt.
            latents, timesteps, conditioning = with_negative(latents, timesteps, conditioning)
        embeds = conditioning["embeds"]
        dtype = embeds.dtype
        velocity = transformer(latents.to(dtype), embeds, timesteps.to(dtype), return_dict=False)[0].float()
        return guided(velocity, guidance.guidance_scale) if is_guided else velocity

    @torch.no_grad()
    def decode(self, latents):
        vae = self.pipeline.vae
        return vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]


def check(path: str, *, height: int | None = None, width: int | None = None) -> float:
    """Largest difference between flowcorr's sampler and the pipeline's own call, from the same noise."""
    family = load_family(ModelConfig(path=path, family=f"{__name__}:AuraFlow"))
    guidance = Guidance(guidance_scale=3.5, negative_prompt="a blurry photo")
    shape = family.latent_shape(height, width)
    noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    prompts = ["a cat", "two dogs on a sofa"]
    conditioning = family.encode(prompts, guidance)
    ours = sample_ode(
        lambda latents, t: family.velocity(family.transformer, latents, t, conditioning, guidance),
        noise,
        family.schedule(4, shape),
    )
    theirs = family.pipeline(
        prompts,
        negative_prompt=[guidance.negative_prompt] * 2,
        guidance_scale=guidance.guidance_scale,
        height=height,
        width=width,
        num_inference_steps=4,
        latents=noise,
        output_type="latent",
    ).images
    return (ours - theirs).abs().max().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path")
    print(f"largest difference from the pipeline: {check(parser.parse_args().path):.2g}")
