"""The trained tensors in the shapes that the engine takes them in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUCKET_BYTES = 2**29  # of whole weights in one call, so that no message holds all of a large transformer


RENAMED = {"qwen_image": (".to_out.0", ".to_out")}
"""Layers that vllm-omni names otherwise than diffusers, by model family."""


def peft_tensors(tensors: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """An adapter's parameters on the CPU, under the names of peft's files and of the engine's layers."""
    return {
        f"base_model.model.{_layer(name, family)}.{_side(name)}.weight": tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }


def peft_config(tensors: Mapping[str, Tensor], family: str, *, rank: int, alpha: float) -> dict[str, Any]:
    """What peft stores beside an adapter; the targets are the very layers that `tensors` belong to."""
    targets = sorted({_layer(name, family) for name in tensors})
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write peft's two files."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def buckets(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, limit: int = BUCKET_BYTES
) -> Iterator[dict[str, Tensor]]:
    """`weights` on the CPU in `dtype`, in parts of at most `limit` bytes or one tensor."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, weight in weights:
        tensor = weight.detach().to("cpu", dtype)
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def _layer(name: str, family: str) -> str:
    layer = name.partition(".lora_")[0]
    theirs, ours = RENAMED.get(family, ("", ""))
    return layer.removesuffix(theirs) + ours if theirs and layer.endswith(theirs) else layer


def _side(name: str) -> str:
    return "lora_A" if ".lora_A." in name else "lora_B"
