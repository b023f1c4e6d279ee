"""GPUs: their memory, their peak speeds, and the share of these speeds that a training step reaches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from flowcorr.errors import ConfigError, unknown_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as in its data sheet.

    Attributes:
        name: its name in reports.
        memory: bytes, as `torch.cuda.get_device_properties` reports them.
        bandwidth: bytes per second.
        bf16: dense FLOP per second in bfloat16 and float16.
        float32: FLOP per second in float32, without TF32.
    """

    name: str
    memory: float
    bandwidth: float
    bf16: float
    float32: float


def _gpu(name: str, gigabytes: float, gigabytes_per_second: float, bf16: float, float32: float) -> Gpu:
    return Gpu(
        name=name,
        memory=gigabytes * 1e9,
        bandwidth=gigabytes_per_second * 1e9,
        bf16=bf16 * 1e12,
        float32=float32 * 1e12,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("rtx4090-24gb", 25.2, 1008, 165, 82.6),
        _gpu("l40s-48gb", 47.6, 864, 362, 91.6),
        _gpu("a100-40gb", 42.3, 1555, 312, 19.5),
        _gpu("a100-80gb", 85.0, 2039, 312, 19.5),
        _gpu("h100-80gb", 85.0, 3350, 989, 67),
        _gpu("h200-141gb", 150.1, 4800, 989, 67),
        _gpu("b200-180gb", 191.4, 7700, 2250, 75),
    )
}
"""From NVIDIA's data sheets of SXM boards. Memory is as torch reports it, a little less than on the data sheet."""

CUSTOM = "memory=48,bandwidth=864,bf16=362,float32=91.6"
"""An example of a GPU given by numbers: GB (1e9 bytes), GB/s and dense TFLOP/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """The share of the data sheet's speed that each kind of work reaches, from measurements on an H100.

    Attributes:
        matmul: matrix products and convolutions, of the dtype's dense peak.
        attention, attention_backward: flash attention and its backward pass, of the same peak.
        masked_attention, masked_attention_backward: memory-efficient attention, used with masks and in float32.
        bandwidth: operations limited by memory, of its bandwidth.
        launch: seconds that the host needs to launch one kernel.
    """

    matmul: float = 0.6
    attention: float = 0.38
    attention_backward: float = 0.3
    masked_attention: float = 0.17
    masked_attention_backward: float = 0.12
    bandwidth: float = 0.78
    launch: float = 5e-6


def find_gpu(text: str) -> Gpu:
    """The GPU of this name, or one given by numbers as in `CUSTOM`; `float32` may be left out.

    Raises:
        ConfigError: `text` is neither a known name nor numbers.
    """
    if "=" not in text:
        if text not in GPUS:
            message = unknown_choice("--gpu", text, GPUS)
            raise ConfigError(f"{message}; or describe another GPU by numbers: --gpu {CUSTOM}")
        return GPUS[text]
    values = _numbers(text)
    return _gpu(
        text,
        values["memory"],
        values["bandwidth"],
        values["bf16"],
        values.get("float32", values["bf16"] / 16),
    )


def _numbers(text: str) -> Mapping[str, float]:
    names = [entry.name for entry in fields(Gpu) if entry.name != "name"]
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            values[name.strip()] = float(number)
        except ValueError:
            raise ConfigError(f"--gpu {text!r}: {part!r} is not a number; write --gpu {CUSTOM}") from None
    missing = [name for name in names if name not in values and name != "float32"]
    odd = [name for name in values if name not in names]
    if missing or odd or not all(0 < value < math.inf for value in values.values()):
        raise ConfigError(
            f"--gpu {text!r} needs positive numbers for memory (GB), bandwidth (GB/s) and bf16 (dense TFLOP/s), and "
            f"optionally float32; write --gpu {CUSTOM}"
        )
    return values
