"""How much of the reference image an edit keeps: the cosine of CLIP's embeddings of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowcorr.records import Prompt
from flowcorr.rewards.base import RewardOutput
from flowcorr.rewards.options import ClipDtype, check_clip_options
from flowcorr.rewards.references import needed_references

if TYPE_CHECKING:
    from flowcorr.rewards.clip import Clip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSimilarity:
    """`cos(image, reference)` in the embedding space of a CLIP model; the mean over a prompt's references.

    It is 1 for an image that was left as it is, so it belongs beside a reward for the instruction: alone it teaches to
    edit nothing. Source: the reward `image_similarity` of Flow-GRPO's recipes for editing models.

    Attributes:
        path: a folder or hub name of the CLIP model and its processor.
        device: a torch device; `auto` takes CUDA if there is any.
        dtype: of the model.
        batch_size: images a forward pass.

    Raises:
        ConfigError: at construction, for options that cannot work and a checkpoint that cannot be loaded.
    """

    path: str = "openai/clip-vit-large-patch14"
    device: str = "auto"
    dtype: ClipDtype = "float32"
    batch_size: int = 16

    name = "reference_similarity"
    extras = ()
    computes_on_gpu = True
    needs_reference = True

    def __post_init__(self) -> None:
        check_clip_options(self.name, self.dtype, self.batch_size, path=self.path, device=self.device)
        self._clip()

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        """Score images `[B, H, W, 3]` uint8.

        Raises:
            BatchError: a prompt has no reference image.
        """
        references = needed_references(self.name, prompts, *images.shape[1:3])
        clip, given = self._clip(), {}
        for prompt, pixels in zip(prompts, references, strict=True):
            if prompt.key not in given:
                given[prompt.key] = clip.embed_images(np.stack(pixels), self.batch_size)
        made = clip.embed_images(images, self.batch_size)
        cosines = [given[prompt.key] @ row for prompt, row in zip(prompts, made, strict=True)]
        return RewardOutput(scores=np.array([float(row.double().mean()) for row in cosines]))

    def _clip(self) -> Clip:
        from flowcorr.rewards.clip import load_clip

        return load_clip(self.name, self.path, self.path, self.device, self.dtype)
