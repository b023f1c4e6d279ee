"""Stable Diffusion 3 and 3.5: spatial latents, two CLIP encoders and an optional T5, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowcorr.config.families import FAMILIES
from flowcorr.config.layers import JOINT_ATTENTION
from flowcorr.models.base import Conditioning, Guidance, InVllmOmni, ModelFamily, TextShapes
from flowcorr.models.schedule import Schedule, dynamic_shift
from flowcorr.models.sizes import check_size
from flowcorr.records import Prompt


class SD3(ModelFamily):
    """`StableDiffusion3Pipeline`; guidance is on above `guidance_scale` 1."""

    name = "sd3"
    pipeline_class = FAMILIES["sd3"].pipeline_class
    lora_targets = JOINT_ATTENTION
    default_text_tokens = 256
    vllm_omni = InVllmOmni(
        transformer="vllm_omni.diffusion.models.sd3.sd3_transformer:SD3Transformer2DModel",
        quantizes=False,  # vllm-omni 0.30
    )

    @classmethod
    def text_shapes(cls, configs: Mapping[str, Mapping[str, Any]], length: int) -> TextShapes:
        transformer = configs["transformer"]
        clip = configs["text_encoder"].get("max_position_embeddings", 77)
        return TextShapes(
            tokens={"text_encoder": clip, "text_encoder_2": clip, "text_encoder_3": length},
            conditioning={
                "prompt_embeds": (clip + length, transformer["joint_attention_dim"]),
                "pooled_prompt_embeds": (transformer["pooled_projection_dim"],),
            },
        )

    def latent_shape(self, height: int | None, width: int | None) -> tuple[int, ...]:
        config = self.transformer.config
        factor = self.pipeline.vae_scale_factor
        height = height or config.sample_size * factor
        width = width or config.sample_size * factor
        multiple = factor * config.patch_size
        check_size(height, width, multiple, largest=multiple * config.pos_embed_max_size)
        return (config.in_channels, height // factor, width // factor)

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        patch = self.transformer.config.patch_size
        return (latent_shape[-2] // patch) * (latent_shape[-1] // patch)

    def schedule(self, num_inference_steps: int, latent_shape: tuple[int, ...]) -> Schedule:
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        shift = dynamic_shift(scheduler.config, self.image_tokens(latent_shape))
        scheduler.set_timesteps(num_inference_steps, **({} if shift is None else {"mu": shift}))
        return Schedule(
            sigmas=tuple(scheduler.sigmas.tolist()), timesteps=tuple(scheduler.timesteps.float().tolist())
        )

    @torch.no_grad()
    def embed(self, prompts: Sequence[Prompt], guidance: Guidance) -> Conditioning:
        embeds, negative, pooled, negative_pooled = self.pipeline.encode_prompt(
            prompt=[prompt.text for prompt in prompts],
            prompt_2=None,
            prompt_3=None,
            negative_prompt=guidance.negative_prompt,
            do_classifier_free_guidance=guidance.guidance_scale > 1,
            max_sequence_length=self.text_tokens,
        )
        conditioning = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
        if guidance.guidance_scale > 1:
            conditioning |= {
                "negative_prompt_embeds": negative,
                "negative_pooled_prompt_embeds": negative_pooled,
            }
        return conditioning

    def predict(
        self,
        transformer: Callable[..., Any],
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Mapping[str, Tensor],
        guidance: Guidance,
    ) -> Tensor:
        embeds = conditioning["prompt_embeds"]
        return transformer(
            hidden_states=latents.to(embeds.dtype),
            timestep=timesteps,
            encoder_hidden_states=embeds,
            pooled_projections=conditioning["pooled_prompt_embeds"],
            return_dict=False,
        )[0].float()
