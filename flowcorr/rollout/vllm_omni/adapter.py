"""The trained tensors in the formats that vllm-omni loads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUCKET_BYTES = 2**29  # bytes of weights in one call, so that no message holds a whole large transformer


def peft_tensors(tensors: Mapping[str, Tensor], layer_suffix: tuple[str, str]) -> dict[str, Tensor]:
    """An adapter's parameters on the CPU, named as in peft's files and after the engine's layers.

    Args:
        tensors: the parameters.
        layer_suffix: see `InVllmOmni`.
    """
    return {
        f"base_model.model.{_layer(name, layer_suffix)}.{_side(name)}.weight": tensor.detach()
        .cpu()
        .contiguous()
        for name, tensor in tensors.items()
    }


def peft_config(
    tensors: Mapping[str, Tensor], layer_suffix: tuple[str, str], *, rank: int, alpha: float
) -> dict[str, Any]:
    """The configuration that peft stores with an adapter; its targets are the layers of `tensors`."""
    targets = sorted({_layer(name, layer_suffix) for name in tensors})
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write the two files of a peft adapter to `folder`: its tensors and its configuration."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def buckets(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, limit: int = BUCKET_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Split `weights` into buckets on the CPU in `dtype`, each of at most `limit` bytes or of one tensor."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, weight in weights:
        tensor = weight.detach().to("cpu", dtype)
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def _layer(name: str, layer_suffix: tuple[str, str]) -> str:
    layer = name.partition(".lora_")[0]
    in_diffusers, in_engine = layer_suffix
    return layer.removesuffix(in_diffusers) + in_engine if layer.endswith(in_diffusers) else layer


def _side(name: str) -> str:
    return "lora_A" if ".lora_A." in name else "lora_B"
