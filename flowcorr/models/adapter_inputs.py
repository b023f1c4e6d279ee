"""Inputs of a transformer and of a VAE on two sides, and the part of an adapter to which a difference belongs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowcorr.models.pipeline_call import Row

PARTS = ("timesteps", "guidance", "latents", "mask", "prompt", "pooled_prompt", "positions")
"""Parts of an adapter that compute inputs of the transformer: those first that explain a difference of others."""
_WORDS: Mapping[str, str] = {
    "mask": "mask",
    "pooled": "pooled_prompt",
    "timestep": "timesteps",
    "guidance": "guidance",
    "ids": "positions",
    "shapes": "positions",
    "rope": "positions",
    "encoder": "prompt",
    "hidden_states": "latents",
    "sample": "latents",
}


def part_of(name: str) -> str:
    """The part of an adapter that computes an input of the transformer, by the input's name."""
    whole = {"t": "timesteps", "x": "latents"}.get(name)
    return whole or next((part for word, part in _WORDS.items() if word in name), "prompt")


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of `theirs`; infinite if their shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    theirs = theirs.float().cpu()
    return float((ours.float().cpu() - theirs).norm() / theirs.norm().clamp(min=1e-12))


def input_differences(
    ours: Row, theirs: Row, limit: float, timestep_limit: float
) -> dict[str, tuple[str, float]]:
    """By part, in the order of `PARTS`, how an input differs and by how much.

    Args:
        ours, theirs: one sample on each side.
        limit: the largest relative difference that passes.
        timestep_limit: that of timesteps.
    """
    differences: dict[str, tuple[str, float]] = {}
    for name in dict.fromkeys([*theirs.inputs, *ours.inputs]):
        part = part_of(name)
        if part == "timesteps":
            told = _timesteps(name, ours.inputs.get(name), theirs.inputs.get(name), timestep_limit)
        elif part == "mask":
            told = None  # judged by the number of tokens that it leaves
        elif part == "prompt":
            part, told = _text(name, ours.inputs, theirs.inputs, limit)
        else:
            told = _values(name, ours.inputs.get(name), theirs.inputs.get(name), limit)
        if told is not None:
            differences.setdefault(part, told)
    return {part: differences[part] for part in PARTS if part in differences}


def decoder_difference(ours: Tensor, theirs: Tensor, limit: float) -> tuple[str, float] | None:
    """The difference of two inputs of the VAE, in words and relative to its size; None if they agree."""
    told = _values("latents", ours, theirs, limit)
    if told is None or ours.shape != theirs.shape or _same_numbers(ours, theirs, limit):
        return told
    x, y = theirs.flatten().double(), ours.flatten().double()
    factor = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum().clamp(min=1e-30))
    shift = float(y.mean() - factor * x.mean())
    if relative(ours, factor * theirs + shift) > limit:
        return told
    return f"the VAE gets {factor:.4g} times the latents of the pipeline's call, plus {shift:.3g}", told[1]


def _timesteps(name: str, ours: Any, theirs: Any, limit: float) -> tuple[str, float] | None:
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return _values(name, ours, theirs, limit)
    fed, expected = ours.double().flatten(), theirs.double().flatten()
    if len(fed) != 1 and len(fed) != len(expected):
        return f"`{name}` has {len(fed)} values, and {len(expected)} in the pipeline's call", float("inf")
    largest = torch.maximum(fed.abs(), expected.abs())
    gaps = torch.where(largest > 1e-6, (fed - expected).abs() / largest.clamp(min=1e-30), 0)
    gap = float(gaps.max())
    if gap <= limit:
        return None
    was, is_ = float(expected[gaps.argmax()]), float(fed.expand(len(expected))[gaps.argmax()])
    times = f": {is_ / was:.4g} times" if was else ""
    return f"the transformer gets `{name}` {is_:.6g}, and {was:.6g} in the pipeline's call{times}", gap


def _text(
    name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], limit: float
) -> tuple[str, tuple[str, float] | None]:
    """The part and the difference of a text input, of which a mask may hide tokens."""
    fed, expected = ours.get(name), theirs.get(name)
    if not isinstance(fed, Tensor) or not isinstance(expected, Tensor) or fed.dim() < 2 or expected.dim() < 2:
        return "prompt", _values(name, fed, expected, limit)
    fed, expected = _unmasked(fed, ours), _unmasked(expected, theirs)
    if len(fed) == len(expected):
        return "prompt", _values(name, fed, expected, limit)
    common = min(len(fed), len(expected))
    gap = relative(fed[:common], expected[:common])
    sentence = (
        f"the transformer reads {len(fed)} tokens of `{name}`, and {len(expected)} in the pipeline's call"
    )
    is_masked = any("mask" in name for name in (*ours, *theirs))
    return ("mask" if is_masked and gap <= limit else "prompt"), (sentence, float("inf"))


def _unmasked(text: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """The tokens of a text `[tokens, width]` that its mask lets through."""
    for name, mask in inputs.items():
        if "mask" in name and isinstance(mask, Tensor) and mask.shape == text.shape[:1]:
            return text[mask.bool()]
    return text


def _values(name: str, ours: Any, theirs: Any, limit: float) -> tuple[str, float] | None:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        ours, theirs = ours.squeeze(), theirs.squeeze()
        if ours.shape != theirs.shape:
            shapes = f"{tuple(ours.shape)}, and {tuple(theirs.shape)}"
            return f"`{name}` is {shapes} in the pipeline's call", float("inf")
        gap = relative(ours, theirs)
        if gap <= limit:
            return None
        if _same_numbers(ours, theirs, limit):
            return f"`{name}` has the numbers of the pipeline's call in another order", gap
        return f"`{name}` differs from that of the pipeline's call by {100 * gap:.2g} %", gap
    if isinstance(ours, Tensor) or isinstance(theirs, Tensor):
        return f"`{name}` is given {'here' if isinstance(ours, Tensor) else 'in the pipeline'} only", float(
            "inf"
        )
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and _plain(ours) != _plain(theirs):
        return f"`{name}` is {_plain(ours)}, and {_plain(theirs)} in the pipeline's call", float("inf")
    return None


def _same_numbers(ours: Tensor, theirs: Tensor, limit: float) -> bool:
    return relative(ours.float().flatten().sort()[0], theirs.float().flatten().sort()[0]) <= limit


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
