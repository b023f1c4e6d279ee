"""Ovis-Image: packed latents, one language model as encoder, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowcorr.config.families import FAMILIES
from flowcorr.config.layers import JOINT_ATTENTION, JOINT_FEED_FORWARD
from flowcorr.models.base import Guidance, InVllmOmni, TextShapes
from flowcorr.models.packed import PackedFamily, positions

_DROPPED_TEMPLATE = 28  # tokens that the pipeline puts before a prompt, and drops after encoding


class OvisImage(PackedFamily):
    """`OvisImagePipeline`; guidance is on above `guidance_scale` 1.

    Prompts are padded to `max_sequence_length` tokens, which the transformer attends to.
    """

    name = "ovis_image"
    pipeline_class = FAMILIES["ovis_image"].pipeline_class
    lora_targets = (*JOINT_ATTENTION, *JOINT_FEED_FORWARD)
    default_text_tokens = 256
    vllm_omni = InVllmOmni(
        transformer="vllm_omni.diffusion.models.ovis_image.ovis_image_transformer:OvisImageTransformer2DModel",
        adapted_layers=("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        quantizes=False,  # vllm-omni 0.30
    )

    @classmethod
    def text_shapes(cls, configs: Mapping[str, Mapping[str, Any]], length: int) -> TextShapes:
        width = configs["transformer"]["joint_attention_dim"]
        return TextShapes(
            tokens={"text_encoder": _DROPPED_TEMPLATE + length},
            conditioning={"prompt_embeds": (length, width)},
        )

    def tokenized_text(self, prompt: str) -> str:
        message = {"role": "user", "content": self.pipeline.system_prompt + prompt}
        return self.pipeline.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    def inputs(
        self, latents: Tensor, conditioning: Mapping[str, Tensor], guidance: Guidance
    ) -> dict[str, Any]:
        embeds = conditioning["prompt_embeds"]
        _, rows, columns, _ = latents.shape
        places = torch.arange(embeds.shape[1], device=embeds.device)
        return {
            "txt_ids": torch.stack([torch.zeros_like(places), places, places], dim=1).to(embeds.dtype),
            "img_ids": positions(1, rows, columns, device=embeds.device).to(embeds.dtype),
        }
