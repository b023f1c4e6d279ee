"""Checks of the return values of a family's methods, so that an error names the method or the part at fault.

A `family` is a `ModelFamily`, whose module imports this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowcorr.errors import ConfigError
from flowcorr.records import Prompt


def check_conditioning(conditioning: Any, place: str, num_prompts: int) -> None:
    """Check that `embed` returned one row a prompt.

    Args:
        conditioning: the answer.
        place: of the family, see `ModelFamily.place`.
        num_prompts: how many were asked for.

    Raises:
        ConfigError: it did not.
    """
    tensors = conditioning if isinstance(conditioning, dict) else {"no dict, but a value": conditioning}
    for name, rows in tensors.items():
        if not isinstance(conditioning, dict) or not has_rows(rows, num_prompts):
            raise ConfigError(
                f"model.family={place}: embed returned {name} of {shape_of(rows)} for {num_prompts} prompts; it has to "
                "return a dict of tensors with one row a prompt"
            )


def check_velocity(velocity: Any, latents: Tensor, place: str, method: str) -> Tensor:
    """The velocity that a method returned for `latents`.

    Args:
        velocity: the answer.
        latents: `[B, *L]`.
        place: of the family, see `ModelFamily.place`.
        method: its name.

    Raises:
        ConfigError: it is no tensor of their shape.
    """
    if isinstance(velocity, Tensor) and velocity.shape == latents.shape:
        return velocity
    raise ConfigError(
        f"model.family={place}: {method} returned {shape_of(velocity)} for latents of {shape_of(latents)}; it has to "
        "return the velocity, a tensor of their shape"
    )


def check_negative(
    conditioning: Mapping[str, Tensor], place: str, scale: str, encodes_negative: bool
) -> None:
    """Check that the conditioning of a guided model has a negative side.

    Args:
        conditioning: what `embed` returned.
        place: of the family, see `ModelFamily.place`.
        scale: the key of `sampling` that turns guidance on, and its value.
        encodes_negative: see `ModelFamily`.

    Raises:
        ConfigError: it has none.
    """
    if any(name.startswith("negative_") for name in conditioning):
        return
    remedy = (
        f"return those of sampling.negative_prompt, too, as negative_NAME for each NAME of {', '.join(conditioning)}"
        if encodes_negative
        else "set it to 1, or, if the transformer takes the scale as an input, return True from the family's "
        "distills_guidance"
    )
    raise ConfigError(
        f"model.family={place}: sampling.{scale} would have no effect, since embed returned no tensors of the negative "
        f"prompt; {remedy}"
    )


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


def has_rows(value: Any, count: int) -> bool:
    """Whether it is a tensor of `count` rows."""
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count


def shape_of(value: Any) -> str:
    """The shape of a tensor, or the type of another value, for messages."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
