"""Qwen-Image: packed latents, one language model as encoder, classifier-free guidance that keeps the norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flowcorr.config.families import FAMILIES
from flowcorr.config.layers import JOINT_ATTENTION
from flowcorr.models.base import Conditioning, Guidance, InVllmOmni, TextShapes
from flowcorr.models.frame_vae import decode_frames, encode_frames
from flowcorr.models.packed import PackedFamily
from flowcorr.models.schedule import Schedule

_DROPPED_TEMPLATE = 34  # tokens that the pipeline puts before a prompt, and drops after encoding


def _call_with_lengths(transformer: Callable[..., Any], **inputs: Any) -> Any:
    """Call vllm-omni's transformer, which also reads the number of text tokens, of padding too."""
    samples, length = inputs["encoder_hidden_states"].shape[:2]
    return transformer(**inputs, txt_seq_lens=[length] * samples)


class QwenImage(PackedFamily):
    """`QwenImagePipeline`; guidance is on above `true_cfg_scale` 1, and `guidance_scale` is not read.

    Prompts are padded to `max_sequence_length` tokens, so that no forward pass depends on which prompts share a
    batch; attention masks the padding.
    """

    name = "qwen_image"
    guidance_key = FAMILIES["qwen_image"].guidance_key
    pipeline_class = FAMILIES["qwen_image"].pipeline_class
    lora_targets = (
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
    vllm_omni = InVllmOmni(
        transformer="vllm_omni.diffusion.models.qwen_image.qwen_image_transformer:QwenImageTransformer2DModel",
        vae="vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_qwenimage:DistributedAutoencoderKLQwenImage",
        call=_call_with_lengths,
        layer_suffix=(".to_out.0", ".to_out"),
    )

    @classmethod
    def text_shapes(cls, configs: Mapping[str, Mapping[str, Any]], length: int) -> TextShapes:
        width = configs["transformer"]["joint_attention_dim"]
        return TextShapes(
            tokens={"text_encoder": _DROPPED_TEMPLATE + length},
            conditioning={"prompt_embeds": (length, width), "prompt_embeds_mask": (length,)},
            template_tokens=5,
            encodes_to_longest=True,
        )

    def in_dtype(self, schedule: Schedule, dtype: torch.dtype) -> Schedule:
        # Unlike other packed families, this transformer multiplies in float32.
        timesteps = torch.tensor(schedule.timesteps, dtype=torch.float64) / 1000
        return replace(schedule, timesteps=tuple((timesteps.to(dtype).double() * 1000).tolist()))

    def tokenized_text(self, prompt: str) -> str:
        return self.pipeline.prompt_template_encode.format(prompt)

    def embed_texts(self, texts: list[str]) -> Conditioning:
        """Embeddings `[B, max_sequence_length, width]` and the mask `[B, max_sequence_length]` of their tokens."""
        length = self.text_tokens
        embeds, mask = self.pipeline.encode_prompt(texts, max_sequence_length=length + 1)
        if mask is None:  # the pipeline's word for a batch without padding
            mask = embeds.new_ones(embeds.shape[:2])
        missing = length - embeds.shape[1]  # -1 cuts the extra token off
        return {
            "prompt_embeds": functional.pad(embeds, (0, 0, 0, missing)),
            "prompt_embeds_mask": functional.pad(mask.bool(), (0, missing)),
        }

    def inputs(
        self, latents: Tensor, conditioning: Mapping[str, Tensor], guidance: Guidance
    ) -> dict[str, Any]:
        samples, rows, columns, _ = latents.shape
        grids = [(1, rows, columns)]
        if "references" in conditioning:
            _, count, height, width, _ = conditioning["references"].shape
            grids += [(1, height, width)] * count
        return {
            "encoder_hidden_states_mask": conditioning["prompt_embeds_mask"],
            "img_shapes": [grids] * samples,
        }

    def guide(self, negative: Tensor, positive: Tensor, scale: float) -> Tensor:
        """As `ModelFamily.guide`, but every token keeps the norm that it has under the prompt: `QwenImagePipeline`."""
        mixed = super().guide(negative, positive, scale)
        return mixed * (positive.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True))

    def encode_image(self, pixels: Tensor) -> Tensor:
        return self.pack(encode_frames(self.pipeline.vae, pixels[:, :, None])[:, :, 0])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        return decode_frames(self.pipeline.vae, self.unpack(latents)[:, :, None])[:, :, 0]
