"""Stable Diffusion 3 and 3.5: spatial latents, two CLIP encoders and an optional T5, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from flowcorr.config.families import FAMILIES
from flowcorr.config.layers import JOINT_ATTENTION
from flowcorr.models.base import Conditioning, Guidance, InVllmOmni, ModelFamily, TextShapes
from flowcorr.models.schedule import Schedule, dynamic_shift, own_schedule
from flowcorr.models.sizes import check_size


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
        shift = dynamic_shift(self.pipeline.scheduler.config, self.image_tokens(latent_shape))
        return own_schedule(self.pipeline.scheduler, num_inference_steps, shift=shift)

    def embed_texts(self, texts: list[str]) -> Conditioning:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            texts, None, None, do_classifier_free_guidance=False, max_sequence_length=self.text_tokens
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

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
