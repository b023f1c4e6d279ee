"""Z-Image: spatial latents, one stream of image and caption tokens, a language model as encoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowcorr.config.families import FAMILIES
from flowcorr.config.layers import ATTENTION
from flowcorr.models.base import Conditioning, Guidance, InVllmOmni, ModelFamily, TextShapes
from flowcorr.models.schedule import Schedule, linear_schedule
from flowcorr.models.sizes import check_size
from flowcorr.records import Prompt

NATIVE_SIZE = 1024
PATCH = 2


def _call_by_length(
    transformer: Callable[..., Any],
    *,
    x: Sequence[Tensor],
    t: Tensor,
    cap_feats: Sequence[Tensor],
    return_dict: bool,
) -> tuple[list[Tensor]]:
    """Call vllm-omni's transformer on captions of one padded length at a time: its attention has no mask."""
    from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF

    velocities: dict[int, Tensor] = {}
    lengths = [math.ceil(len(caption) / SEQ_MULTI_OF) for caption in cap_feats]
    for length in dict.fromkeys(lengths):
        rows = [row for row, other_length in enumerate(lengths) if other_length == length]
        predicted, _ = transformer(
            x=[x[row] for row in rows], t=t[rows], cap_feats=[cap_feats[row] for row in rows]
        )
        velocities |= zip(rows, predicted, strict=True)
    return ([velocities[row] for row in range(len(x))],)


class ZImage(ModelFamily):
    """`ZImagePipeline`; guidance is on above `guidance_scale` 1.

    The pipeline counts guidance from 0: its `guidance_scale` of 4 is 5 here, and the Turbo model's 0 is 1.

    The transformer reads captions of their own lengths: the length decides where the image's positions begin. So
    conditioning is padded to `max_sequence_length` tokens beside a mask, and every forward pass reads that mask on the
    host to cut captions out.
    """

    name = "z_image"
    pipeline_class = FAMILIES["z_image"].pipeline_class
    lora_targets = (
        *(f"attention.{layer}" for layer in ATTENTION),
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
    )
    vllm_omni = InVllmOmni(
        transformer="vllm_omni.diffusion.models.z_image.z_image_transformer:ZImageTransformer2DModel",
        call=_call_by_length,
    )

    @classmethod
    def text_shapes(cls, configs: Mapping[str, Mapping[str, Any]], length: int) -> TextShapes:
        width = configs["transformer"]["cap_feat_dim"]
        return TextShapes(
            tokens={"text_encoder": length},
            conditioning={"prompt_embeds": (length, width), "prompt_embeds_mask": (length,)},
            template_tokens=8,
        )

    def latent_shape(self, height: int | None, width: int | None) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        height, width = height or NATIVE_SIZE, width or NATIVE_SIZE
        check_size(height, width, PATCH * factor)
        return (self.transformer.config.in_channels, height // factor, width // factor)

    def schedule(self, num_inference_steps: int, latent_shape: tuple[int, ...]) -> Schedule:
        return linear_schedule(self.pipeline.scheduler, num_inference_steps, self.image_tokens(latent_shape))

    def tokenized_text(self, prompt: str) -> str:
        message = {"role": "user", "content": prompt}
        return self.pipeline.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )

    def call_arguments(self, prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
        scale = {"guidance_scale": guidance.guidance_scale - 1}
        return super().call_arguments(prompt, guidance) | scale

    def embed_texts(self, texts: list[str]) -> Conditioning:
        """Embeddings `[B, max_sequence_length, width]`, and the mask `[B, max_sequence_length]` of their tokens."""
        length = self.text_tokens
        captions, _ = self.pipeline.encode_prompt(
            texts, do_classifier_free_guidance=False, max_sequence_length=length
        )
        whole = captions[0].new_zeros(length, captions[0].shape[-1])  # so that the padding reaches `length`
        embeds = pad_sequence([*captions, whole], batch_first=True)[:-1]
        ends = torch.tensor([[len(caption)] for caption in captions], device=embeds.device)
        return {
            "prompt_embeds": embeds,
            "prompt_embeds_mask": torch.arange(length, device=embeds.device) < ends,
        }

    def predict(
        self,
        transformer: Callable[..., Any],
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Mapping[str, Tensor],
        guidance: Guidance,
    ) -> Tensor:
        embeds, mask = conditioning["prompt_embeds"], conditioning["prompt_embeds_mask"]
        frames = transformer(
            x=list(latents.to(embeds.dtype).unsqueeze(2)),
            t=(1000 - timesteps) / 1000,
            cap_feats=[rows[kept] for rows, kept in zip(embeds, mask, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(frames).squeeze(2).float()  # the transformer predicts the way to the image
