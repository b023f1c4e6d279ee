"""Qwen-Image-Edit: Qwen-Image with reference images, for its text encoder and for its transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from flowcorr.config.families import FAMILIES
from flowcorr.models.base import Conditioning, Guidance, TextShapes
from flowcorr.models.qwen_image import QwenImage
from flowcorr.records import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

_DROPPED_TEMPLATE = 64  # tokens that the pipeline puts before images and prompt, and drops after encoding
_KEPT_TEMPLATE = 26  # 5 around the prompt, and at most 7 around each of three images
_AREA = 1024 * 1024  # pixels of a reference image, whatever the size that is drawn


class QwenImageEdit(QwenImage):
    """`QwenImageEditPipeline`: one reference image, of about a megapixel for text encoder and transformer.

    It is cut to the proportions of the image that is drawn, so that all prompts have equally many tokens. Of a prompt,
    `max_sequence_length` tokens are read beside its images.
    """

    name = "qwen_image_edit"
    pipeline_class = FAMILIES["qwen_image_edit"].pipeline_class
    num_references = (1, 1)
    vision_tokens = 37 * 37

    @classmethod
    def text_shapes(cls, configs: Mapping[str, Mapping[str, Any]], length: int) -> TextShapes:
        shapes = super().text_shapes(configs, length)
        return replace(
            shapes,
            tokens={"text_encoder": _DROPPED_TEMPLATE + length},
            template_tokens=_KEPT_TEMPLATE,
            encodes_to_longest=False,
        )

    def reference_shapes(self, latent_shape: tuple[int, ...], count: int) -> dict[str, tuple[int, ...]]:
        factor = 2 * self.pipeline.vae_scale_factor
        width, height = _dimensions(_AREA, latent_shape[1] / latent_shape[0])
        return {"references": (count, height // factor, width // factor, latent_shape[-1])} if count else {}

    def call_arguments(self, prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
        arguments = super().call_arguments(prompt, guidance)
        del arguments["max_sequence_length"]  # the pipeline counts the images' tokens, too
        return arguments

    def embed(self, prompts: Sequence[Prompt], guidance: Guidance) -> Conditioning:
        rows = []
        for prompt in prompts:
            row = self._embed(prompt.text, prompt)
            if self.needs_negative(guidance):
                negative = self._embed(guidance.negative_prompt, prompt)
                row |= {f"negative_{name}": values for name, values in negative.items()}
            rows.append(row)
        conditioning = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return conditioning | self.encode_references(prompts)

    @torch.no_grad()
    def _embed(self, text: str, prompt: Prompt) -> Conditioning:
        """Embeddings `[1, tokens, width]` of a text together with the prompt's images, and the mask of their tokens."""
        images = [self.seen_by_encoder(image) for image in self.fitted_references(prompt)]
        embeds, _ = self.pipeline.encode_prompt([text], image=images)
        reader = self.pipeline.processor.image_processor
        seen = sum(
            reader.get_number_of_image_patches(image.height, image.width, {}) // reader.merge_size**2
            for image in images
        )
        missing = self.text_tokens + seen - embeds.shape[1]
        mask = embeds.new_ones(embeds.shape[:2], dtype=torch.bool)
        return {
            "prompt_embeds": functional.pad(embeds, (0, 0, 0, missing)),
            "prompt_embeds_mask": functional.pad(mask, (0, missing)),
        }

    def fitted_references(self, prompt: Prompt) -> list[Image]:
        height, width = self.image_size(*self.reference_size)
        width, height = _dimensions(_AREA, width / height)
        return [image.fitted(height, width) for image in prompt.images]

    def seen_by_encoder(self, image: Image) -> Image:
        """A fitted reference image at the size that the text encoder sees."""
        return image


class QwenImageEditPlus(QwenImageEdit):
    """`QwenImageEditPlusPipeline`: several reference images, which the text encoder sees smaller.

    Its checkpoints were trained on one to three.
    """

    name = "qwen_image_edit_plus"
    pipeline_class = FAMILIES["qwen_image_edit_plus"].pipeline_class
    num_references = (1, 3)
    vision_tokens = 14 * 14

    def tokenized_text(self, prompt: str) -> str:
        return super().tokenized_text(f"Picture 1: <|vision_start|><|image_pad|><|vision_end|>{prompt}")

    def seen_by_encoder(self, image: Image) -> Image:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE

        width, height = _dimensions(CONDITION_IMAGE_SIZE, image.width / image.height)
        resized: Image = self.pipeline.image_processor.resize(image, height, width)
        return resized


def _dimensions(area: int, ratio: float) -> tuple[int, int]:
    """Width and height of about `area` pixels, as the pipelines round them."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    width, height = calculate_dimensions(area, ratio)
    return width, height
