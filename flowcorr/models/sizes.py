"""Sizes of images and videos that a model cannot make, with the nearest that it can."""

from __future__ import annotations

from flowcorr.errors import ConfigError


def check_frame_count(num_frames: int, factor: int) -> None:
    """Check that `num_frames` is one frame more than a multiple of `factor`, as a VAE that packs frames makes them.

    Raises:
        ConfigError: it is not.
    """
    if num_frames % factor != 1 % factor:
        below = (num_frames - 1) // factor * factor + 1
        raise ConfigError(
            f"sampling.num_frames={num_frames} does not fit the model: it must be a multiple of {factor} and one more, "
            f"such as {below} or {below + factor}"
        )


def check_size(
    height: int | None,
    width: int | None,
    multiple: int,
    *,
    largest: int | None = None,
    section: str = "sampling.",
) -> None:
    """Check the size of an image.

    Args:
        height, width: in pixels; null is not checked.
        multiple: what they must be multiples of.
        largest: the largest that the model can place; None if it can place any.
        section: the beginning of their keys, for messages.

    Raises:
        ConfigError: one of them does not fit.
    """
    for key, value in (("height", height), ("width", width)):
        if value is not None and value % multiple:
            raise ConfigError(
                f"{section}{key}={value} does not fit the model: it must be a multiple of {multiple}, "
                f"such as {max(value // multiple, 1) * multiple}"
            )
        if value is not None and largest is not None and value > largest:
            raise ConfigError(
                f"{section}{key}={value} is larger than the model's positions allow; use at most {largest}"
            )
