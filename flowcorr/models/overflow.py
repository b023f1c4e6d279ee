"""Embeddings that are not finite, with the part of the pipeline that overflows or has damaged weights.

A `family` is a `ModelFamily`, whose module imports this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowcorr.errors import ConfigError
from flowcorr.records import Prompt


def check_finite(
    family: Any, prompts: Sequence[Prompt], guidance: Any, conditioning: Mapping[str, Tensor]
) -> None:
    """Check the conditioning that a family gave prompts under this guidance; tokens that a mask hides do not count.

    Raises:
        ConfigError: a number is not finite. The message names the prompt, and the encoders that gave such numbers.
    """
    for name, rows in conditioning.items():
        if not rows.is_floating_point():
            continue
        finite, mask = rows.isfinite(), conditioning.get(f"{name}_mask")
        if mask is not None:
            finite |= ~mask.unsqueeze(-1)
        lost = (~finite.flatten(1).all(1)).nonzero().flatten().tolist()
        if not lost:
            continue
        prompt = prompts[lost[0]]
        place = prompt.place or repr(prompt.text)
        subject = f"the negative prompt of {place}" if name.startswith("negative_") else place
        parts = ["vae"] if name == "references" else _overflowing(family, prompt, guidance)
        part = f"{' and '.join(parts) or 'a text encoder'} of the model"
        cause = f"{part} has damaged weights; download the model again"
        if family.dtype == torch.float16:  # the others reach as far as float32
            cause = f"{part} overflows in float16; set model.dtype=bfloat16"
        raise ConfigError(f"{subject}: its embeddings ({name}) are not finite: {cause}")


def _overflowing(family: Any, prompt: Prompt, guidance: Any) -> list[str]:
    """Names of the text encoders with an output that is not finite, for one prompt."""
    names: dict[str, None] = {}

    def look(name: str, output: Any) -> None:
        values = output if isinstance(output, Tensor) else output[0]
        if not bool(values.isfinite().all()):
            names[f"{name} ({type(family.text_encoders[name]).__name__})"] = None

    hooks = [
        encoder.register_forward_hook(lambda module, inputs, output, name=name: look(name, output))
        for name, encoder in family.text_encoders.items()
    ]
    try:
        with torch.no_grad():
            family.embed([prompt], guidance)
    finally:
        for hook in hooks:
            hook.remove()
    return list(names)
