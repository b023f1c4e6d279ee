"""FLUX.2 klein: packed latents, three layers of a language model as text, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowcorr.config.families import FAMILIES
from flowcorr.config.layers import JOINT_ATTENTION
from flowcorr.errors import ConfigError
from flowcorr.models.base import Conditioning, Guidance, InVllmOmni, TextShapes
from flowcorr.models.packed import PackedFamily, positions
from flowcorr.models.schedule import Schedule, linear_schedule
from flowcorr.records import Prompt


class Flux2Klein(PackedFamily):
    """`Flux2KleinPipeline`; guidance is on above `guidance_scale` 1, for the base models only.

    Prompts are padded to `max_sequence_length` tokens, which the transformer attends to. Reference images are read
    behind the image that is drawn.
    """

    name = "flux2_klein"
    pipeline_class = FAMILIES["flux2_klein"].pipeline_class
    lora_targets = (
        *JOINT_ATTENTION,
        "attn.to_qkv_mlp_proj",
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
    )
    num_references = (0, 4)
    vllm_omni = InVllmOmni(
        transformer="vllm_omni.diffusion.models.flux2_klein.flux2_klein_transformer:Flux2Transformer2DModel",
        vae="diffusers:AutoencoderKLFlux2",
    )

    @classmethod
    def text_shapes(cls, configs: Mapping[str, Mapping[str, Any]], length: int) -> TextShapes:
        width = configs["transformer"]["joint_attention_dim"]
        return TextShapes(tokens={"text_encoder": length}, conditioning={"prompt_embeds": (length, width)})

    def schedule(self, num_inference_steps: int, latent_shape: tuple[int, ...]) -> Schedule:
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        tokens = self.image_tokens(latent_shape)
        shift = compute_empirical_mu(tokens, num_inference_steps)
        return linear_schedule(self.pipeline.scheduler, num_inference_steps, tokens, shift=shift)

    def tokenized_text(self, prompt: str) -> str:
        message = {"role": "user", "content": prompt}
        return self.pipeline.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    def embed(self, prompts: Sequence[Prompt], guidance: Guidance) -> Conditioning:
        """See `ModelFamily.embed`.

        Raises:
            ConfigError: guidance is on, and the model was distilled to do without.
        """
        if self.needs_negative(guidance) and self.pipeline.config.is_distilled:
            raise ConfigError(
                f"sampling.guidance_scale={guidance.guidance_scale} needs a base model, and this one was distilled to "
                "sample without guidance; set it to 1, or set model.path to FLUX.2-klein-base"
            )
        return super().embed(prompts, guidance)

    def embed_texts(self, texts: list[str]) -> Conditioning:
        embeds, _ = self.pipeline.encode_prompt(texts, max_sequence_length=self.text_tokens)
        return {"prompt_embeds": embeds}

    def inputs(
        self, latents: Tensor, conditioning: Mapping[str, Tensor], guidance: Guidance
    ) -> dict[str, Any]:
        embeds = conditioning["prompt_embeds"]
        _, rows, columns, _ = latents.shape
        places = positions(1, rows, columns, 1, device=embeds.device)
        if "references" in conditioning:
            _, count, *grid, _ = conditioning["references"].shape
            places_of_references = positions(count, *grid, 1, device=embeds.device)
            places_of_references[:, 0] = 10 * (places_of_references[:, 0] + 1)
            places = torch.cat([places, places_of_references])
        text = positions(1, 1, 1, embeds.shape[1], device=embeds.device)
        return {"guidance": None, "txt_ids": text, "img_ids": places}

    def encode_image(self, pixels: Tensor) -> Tensor:
        vae = self.pipeline.vae
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        return (self.pack(vae.encode(pixels).latent_dist.mode()) - vae.bn.running_mean) / std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        spatial = self.unpack(latents * std + vae.bn.running_mean)
        return vae.decode(spatial.to(vae.dtype), return_dict=False)[0]
