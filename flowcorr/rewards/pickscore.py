"""PickScore: which image people pick for a prompt. Source: Kirstain et al. 2023, arXiv:2305.01569, section 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowcorr.records import Prompt
from flowcorr.rewards.base import RewardOutput
from flowcorr.rewards.options import ClipDtype, check_clip_options, check_positive

if TYPE_CHECKING:
    from flowcorr.rewards.clip import Clip


@dataclass(frozen=True, slots=True, kw_only=True)
class PickScore:
    """`logit_scale * cos(text, image) / divisor`, by a CLIP-H that was trained on people's choices.

    Published scores, about 17 to 24, are undivided; they are logged as `logit`. The default divisor is that of
    Flow-GRPO's recipes, which brings them near 1, and weights beside other rewards count on it.

    Attributes:
        path: a folder or hub name of the checkpoint.
        processor: a folder or hub name of its processor, which the published checkpoint has elsewhere.
        divisor: of the score; 1 leaves it as published.
        device: a torch device; `auto` takes CUDA if there is any.
        dtype: of the model; a group's scores differ by some percent, and bfloat16 rounds to 0.4 percent.
        batch_size: images a forward pass.

    Raises:
        ConfigError: at construction, for options that cannot work and a checkpoint that cannot be loaded.
    """

    path: str = "yuvalkirstain/PickScore_v1"
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    divisor: float = 26.0
    device: str = "auto"
    dtype: ClipDtype = "float32"
    batch_size: int = 16

    name = "pickscore"
    extras = ("logit",)
    computes_on_gpu = True

    def __post_init__(self) -> None:
        texts = {"path": self.path, "processor": self.processor, "device": self.device}
        check_clip_options(self.name, self.dtype, self.batch_size, **texts)
        check_positive(self.name, "divisor", self.divisor)
        self._clip()

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardOutput:
        """Score images `[B, H, W, 3]` uint8 against the texts of their prompts."""
        clip = self._clip()
        image = clip.embed_images(images, self.batch_size)
        text = clip.embed_texts([prompt.text for prompt in prompts], self.batch_size)
        logits = clip.logit_scale * (image * text).sum(-1).double().numpy()
        return RewardOutput(scores=logits / self.divisor, extra={"logit": logits})

    def describe_cuts(self, prompts: Sequence[Prompt]) -> str | None:
        """A sentence on prompts that are longer than the checkpoint reads, usually 77 tokens; None if there is none."""
        clip = self._clip()
        cut = clip.are_cut([prompt.text for prompt in prompts])
        if not any(cut):
            return None
        first = prompts[cut.index(True)]
        return (
            f"prompts are cut ({first.place or repr(first.text[:60])} is the first) by reward {self.name}: {sum(cut)} "
            f"of {len(prompts)} beyond {clip.max_tokens} tokens; no score depends on what stands behind them, so "
            "shorten these prompts, or add a reward that reads them whole"
        )

    def _clip(self) -> Clip:
        from flowcorr.rewards.clip import load_clip

        return load_clip(self.name, self.path, self.processor, self.device, self.dtype)
