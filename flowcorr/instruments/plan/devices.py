"""GPUs: their memory, their peak speeds, and the share of these speeds that is reached."""

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
        link: bytes per second that it sends to the other GPUs of its machine while it receives as many.
        headroom: how much more of `bf16` its products reach than those of an H100.
    """

    name: str
    memory: float
    bandwidth: float
    bf16: float
    float32: float
    link: float
    headroom: float = 1.0

    @property
    def half(self) -> float:
        """FLOP per second in bfloat16 and float16 of which products reach the share of `Speed`."""
        return self.bf16 * self.headroom

    def link_among(self, ranks: int) -> float:
        """Bytes per second that each of so many ranks sends to the others, all at once."""
        return self.link if ranks <= GPUS_A_MACHINE else min(self.link, NETWORK)


GPUS_A_MACHINE = 8
NETWORK = 50e9
"""Bytes per second of a GPU's share of the network between machines: 400 Gbit/s, as in DGX H100."""
PCIE_4, PCIE_5 = 32.0, 64.0
"""GB per second of 16 lanes, in one direction."""
GEFORCE = 1.65
"""GeForce boards sum products up in float32 at half their tensor cores' rate, and clock above their data sheet."""


def _gpu(
    name: str,
    gigabytes: float,
    gigabytes_per_second: float,
    bf16: float,
    float32: float,
    link: float,
    headroom: float = 1.0,
) -> Gpu:
    return Gpu(
        name=name,
        memory=gigabytes * 1e9,
        bandwidth=gigabytes_per_second * 1e9,
        bf16=bf16 * 1e12,
        float32=float32 * 1e12,
        link=link * 1e9,
        headroom=headroom,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("rtx4070-12gb", 12.4, 504, 58.3, 29.1, PCIE_4, GEFORCE),
        _gpu("rtx4080-16gb", 16.8, 716.8, 97.5, 48.7, PCIE_4, GEFORCE),
        _gpu("rtx4090-24gb", 25.2, 1008, 165, 82.6, PCIE_4, GEFORCE),
        _gpu("rtx5090-32gb", 33.7, 1792, 209.5, 104.8, PCIE_5, GEFORCE),
        _gpu("l40s-48gb", 47.6, 864, 362, 91.6, PCIE_4),
        _gpu("a100-40gb-pcie", 42.3, 1555, 312, 19.5, PCIE_4),
        _gpu("a100-40gb-sxm", 42.3, 1555, 312, 19.5, 300),
        _gpu("a100-80gb-pcie", 85.0, 1935, 312, 19.5, PCIE_4),
        _gpu("a100-80gb-sxm", 85.0, 2039, 312, 19.5, 300),
        _gpu("h20-96gb", 102.6, 4000, 148, 44, 450),
        _gpu("h800-80gb", 85.0, 3350, 989, 67, 200),
        _gpu("h100-80gb", 85.0, 3350, 989, 67, 450),
        _gpu("h200-141gb", 150.1, 4800, 989, 67, 450),
        _gpu("b200-180gb", 191.4, 7700, 2250, 75, 900),
    )
}
"""From NVIDIA's data sheets; of H and B, SXM boards. Memory is as torch reports it, a little less than on the data
sheet. NVLink's data sheets add both directions up."""

CUSTOM = "memory=48,bandwidth=864,bf16=362,float32=91.6,link=32"
"""An example of a GPU given by numbers: GB (1e9 bytes), GB/s and dense TFLOP/s."""
OPTIONAL = ("float32", "link")
"""Numbers that may be left out: a sixteenth of `bf16`, and PCIe 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Achieved fractions of a GPU's peak compute and bandwidth, and launch overhead, of a kind of engine.

    Attributes:
        share: of the peak of arithmetic.
        launch: seconds of the host for each operation.
        source: where these numbers are from.
        traffic: share of the memory's bandwidth.
        in_turn: whether kernels that compute and kernels that only move bytes take turns; fused ones do both at once.
    """

    share: float
    launch: float
    source: str
    traffic: float = 1.0
    in_turn: bool = False


EAGER = Speed(
    share=0.62,
    traffic=0.66,
    in_turn=True,
    launch=10e-6,
    source="the trainer computes eagerly: four fifths of the 0.77 and 0.83 that products and copies reach on an H200",
)
DECODING = Speed(
    share=0.18,
    traffic=0.83,
    in_turn=True,
    launch=10e-6,
    source="decoders convolve: 0.17 to 0.19 on an H200",
)
COMPILED = Speed(
    share=0.57,
    launch=11.5e-6,
    source="compiled models without adapters are published at 0.5 to 0.63 of the peak (sglang, 2026)",
)
ADAPTED = Speed(
    share=0.41,
    launch=11.5e-6,
    source="vllm-omni's layers for adapters take 1.2 to 2.4 times as long as merged weights (verl-omni, 2026)",
)
LINK = 0.8
"""The share of a link's bandwidth that collectives reach."""


def find_gpu(text: str) -> Gpu:
    """The GPU of this name, or one described by numbers as in `CUSTOM`; `OPTIONAL` names may be left out.

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
        values.get("link", PCIE_4),
    )


def _numbers(text: str) -> Mapping[str, float]:
    names = [entry.name for entry in fields(Gpu) if entry.name not in ("name", "headroom")]
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            values[name.strip()] = float(number)
        except ValueError:
            raise ConfigError(f"--gpu {text!r}: {part!r} is not a number; write --gpu {CUSTOM}") from None
    missing = [name for name in names if name not in (*values, *OPTIONAL)]
    odd = [name for name in values if name not in names]
    if missing or odd or not all(0 < value < math.inf for value in values.values()):
        raise ConfigError(
            f"--gpu {text!r} needs positive numbers for memory (GB), bandwidth (GB/s) and bf16 (dense TFLOP/s), and "
            f"optionally float32 and link (GB/s); write --gpu {CUSTOM}"
        )
    return values
