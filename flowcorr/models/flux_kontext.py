"""FLUX.1 Kontext: FLUX.1 with a reference image, as tokens behind the tokens of the drawn image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowcorr.config.families import FAMILIES
from flowcorr.models.base import Guidance, InVllmOmni
from flowcorr.models.flux import Flux
from flowcorr.models.packed import positions
from flowcorr.records import Prompt


class FluxKontext(Flux):
    """`FluxKontextPipeline`; without a reference image it draws from the text alone.

    The reference is fitted to the size that is drawn, and not to the pipeline's list of sizes of about a megapixel:
    at that size it is its call, and at a smaller one its call without `_auto_resize`.
    """

    name = "flux_kontext"
    pipeline_class = FAMILIES["flux_kontext"].pipeline_class
    num_references = (0, 1)
    vllm_omni = InVllmOmni(
        transformer="vllm_omni.diffusion.models.flux.flux_transformer:FluxKontextTransformer2DModel"
    )

    def call_arguments(self, prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
        height, width = self.image_size(*self.reference_size)
        own = {"_auto_resize": False, "max_area": height * width}
        return super().call_arguments(prompt, guidance) | own

    def places(self, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        places = super().places(latents, conditioning)
        if "references" not in conditioning:
            return places
        _, _, rows, columns, _ = conditioning["references"].shape
        places_of_reference = positions(1, rows, columns, device=latents.device)
        places_of_reference[:, 0] = 1  # apart from the image that is drawn
        return torch.cat([places, places_of_reference])
