"""FLUX.1: packed latents, CLIP and T5 encoders, guidance distilled into an input of the transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowcorr.config.families import FAMILIES
from flowcorr.config.layers import JOINT_ATTENTION, JOINT_FEED_FORWARD
from flowcorr.models.base import Conditioning, Guidance, InVllmOmni, TextShapes
from flowcorr.models.packed import PackedFamily, positions


class Flux(PackedFamily):
    """`FluxPipeline`; dev reads `guidance_scale` as an input, schnell has no guidance."""

    name = "flux"
    pipeline_class = FAMILIES["flux"].pipeline_class
    lora_targets = (*JOINT_ATTENTION, *JOINT_FEED_FORWARD)
    encodes_negative = False
    vllm_omni = InVllmOmni(
        transformer="vllm_omni.diffusion.models.flux.flux_transformer:FluxTransformer2DModel"
    )

    @classmethod
    def text_shapes(cls, configs: Mapping[str, Mapping[str, Any]], length: int) -> TextShapes:
        transformer = configs["transformer"]
        clip = configs["text_encoder"].get("max_position_embeddings", 77)
        return TextShapes(
            tokens={"text_encoder": clip, "text_encoder_2": length},
            conditioning={
                "prompt_embeds": (length, transformer["joint_attention_dim"]),
                "pooled_prompt_embeds": (transformer["pooled_projection_dim"],),
            },
        )

    @property
    def distills_guidance(self) -> bool:
        return bool(self.transformer.config.guidance_embeds)

    def guidance_in_dtype(self, guidance: Guidance, dtype: torch.dtype) -> Guidance:
        # The transformer casts the scale and multiplies it by 1000 there: 3.5 becomes 3504 in bfloat16.
        if not self.distills_guidance:
            return guidance
        embedded = torch.tensor(guidance.guidance_scale, dtype=dtype) * 1000
        return replace(guidance, guidance_scale=embedded.item() / 1000)

    def embed_texts(self, texts: list[str]) -> Conditioning:
        embeds, pooled, _ = self.pipeline.encode_prompt(texts, None, max_sequence_length=self.text_tokens)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def inputs(
        self, latents: Tensor, conditioning: Mapping[str, Tensor], guidance: Guidance
    ) -> dict[str, Any]:
        embeds = conditioning["prompt_embeds"]
        scale = latents.new_full((len(latents),), guidance.guidance_scale)
        return {
            "guidance": scale if self.distills_guidance else None,
            "pooled_projections": conditioning["pooled_prompt_embeds"],
            "txt_ids": embeds.new_zeros(embeds.shape[1], 3),
            "img_ids": self.places(latents, conditioning).to(embeds.dtype),
        }

    def places(self, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Places `[tokens, 3]` of the tokens of all images, first of the one that is drawn."""
        _, rows, columns, _ = latents.shape
        return positions(1, rows, columns, device=latents.device)
