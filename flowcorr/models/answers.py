"""Checks of the return values of a family's methods, so that an error names the method at fault."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowcorr.errors import ConfigError


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


def has_rows(value: Any, count: int) -> bool:
    """Whether it is a tensor of `count` rows."""
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count


def shape_of(value: Any) -> str:
    """The shape of a tensor, or the type of another value, for messages."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
