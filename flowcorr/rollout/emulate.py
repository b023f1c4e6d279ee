"""Weights as a low-precision engine holds them, rounded and kept in float: a real mismatch on any machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

FP8_MAX = 448.0


def _fp8(weight: Tensor) -> Tensor:
    """float8 e4m3 with one scale an output channel."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def _integer(weight: Tensor, bits: int) -> Tensor:
    """Symmetric integers with one scale an output channel."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / largest
    return (weight / scale).round().clamp(-largest, largest) * scale


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": _fp8,
    "int8": partial(_integer, bits=8),
    "int4": partial(_integer, bits=4),
}


def round_weight(weight: Tensor, emulate: str) -> Tensor:
    """Round a matrix `[out, in]`; vectors and convolutions keep their precision."""
    if emulate == "none" or weight.dim() != 2:
        return weight
    # Scales are at least float32, as engines keep them: float16 holds none of a row of zeros.
    precise = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return ROUNDINGS[emulate](precise).to(weight.dtype)
