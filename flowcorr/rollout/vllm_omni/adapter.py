"""The trained tensors in the formats that vllm-omni loads, and digests that tell whether they arrived."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CUBED = 0x9E3779B97F4A7C15 - 2**64  # odd, so that no bit of a cube is lost
_WHOLE = 2**64
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


def digest(tensor: Tensor) -> int:
    """Hash the bits of all elements to a number below 2^64, in which their order and place do not count.

    The digests of parts add up to that of the whole, modulo 2^64, and zeros count nothing. So fused, sharded and padded
    tensors have comparable digests.
    """
    whole = tensor.detach().contiguous()
    bits = whole.view({2: torch.int16, 4: torch.int32}[whole.element_size()]).long()
    return int((bits + _CUBED * bits * bits * bits).sum()) % _WHOLE


def adapter_digests(
    tensors: Mapping[str, Tensor],
    layer_suffix: tuple[str, str],
    dtype: torch.dtype,
    *,
    rank: int,
    alpha: float,
) -> dict[str, int]:
    """Digests of an adapter as the engine holds it: in its dtype, each B times `alpha / rank`, named `LAYER.lora_A`."""
    digests = {}
    for name, tensor in tensors.items():
        side, value = _side(name), tensor.detach().to(dtype)
        scaled = value * (alpha / rank) if side == "lora_B" and alpha != rank else value
        digests[f"{_layer(name, layer_suffix)}.{side}"] = digest(scaled)
    return digests


def differing(expected: Mapping[str, int], held: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
    """Names with a digest that differs from the tensors that the workers hold, whole or in shards.

    Args:
        expected: by name.
        held: of each worker, by name: the digests of the parts of a fused layer, `[one]` if it has none. A name that is
            missing has no parts.
    """
    names = []
    for name in sorted({*expected, *(name for worker in held for name in worker)}):
        parts = [worker.get(name, ()) for worker in held]
        # A sharded tensor's parts add up over the workers. One that each worker has whole is the same everywhere, and
        # so is A in each part of a fused layer.
        sums = {sum(worker) % _WHOLE for worker in parts}
        candidates = sums if len(sums) == 1 else set()
        candidates |= {sum(sum(worker) for worker in parts) % _WHOLE}
        candidates |= (
            {worker[0] for worker in parts if len({*worker}) == 1} if name.endswith(".lora_A") else set()
        )
        if expected.get(name, 0) not in candidates:
            names.append(name)
    return names


def _layer(name: str, layer_suffix: tuple[str, str]) -> str:
    layer = name.partition(".lora_")[0]
    in_diffusers, in_engine = layer_suffix
    return layer.removesuffix(in_diffusers) + in_engine if layer.endswith(in_diffusers) else layer


def _side(name: str) -> str:
    return "lora_A" if ".lora_A." in name else "lora_B"
