"""What the device reaches: bandwidth, matrix products, attention, launches, and copies from the host."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch
from torch.nn import functional

import flowcorr
from flowcorr.devices import free_memory
from flowcorr.instruments.plan.devices import EAGER, GPUS, PCIE_4, Gpu
from tests.gpu.hour import meter
from tests.gpu.hour.parts import Hour

PRODUCTS, BANDWIDTH = 0.77, 0.83
"""Of the data sheet, as on an H200."""
ATTENTION = {"attention": (0.36, 0.41), "masked_attention": (0.25, 0.25)}
"""The same of the peak, forwards and backwards; memory-efficient attention is used with masks and in float32."""


def measure(hour: Hour) -> None:
    device = hour.device
    memory = float(free_memory(device))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, float(properties.total_memory)
        hour.row(
            "device",
            name,
            note=f"capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}",
        )
        hour.row("free memory", free_memory(device) / 1e9, unit="GB")
    else:
        name = platform.processor() or platform.machine()
        hour.row("device", f"CPU {name}")
    hour.row("memory", memory / 1e9, unit="GB")
    hour.row("versions", ", ".join(_versions()))

    large = 2**22 if hour.tiny else 2**30
    source = torch.empty(large, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    bandwidth = 2 * large / meter.seconds(device, lambda: copy.copy_(source), repeats=5)
    size = 256 if hour.tiny else 8192
    bf16 = _product(device, size, torch.bfloat16)
    float32 = _product(device, size // 2, torch.float32)
    known = known_gpu(name, memory)
    if known is None:
        sheet = {"bandwidth": bandwidth / BANDWIDTH, "bf16": bf16 / PRODUCTS}
        sheet["float32"] = float32 / PRODUCTS
        sheet["link"] = PCIE_4 * 1e9
    else:
        sheet = {key: getattr(known, key) for key in ("bandwidth", "bf16", "float32", "link", "headroom")}
        hour.row("known to flowcorr plan as", known.name)
    hour.fact("gpu", {"name": name if known is None else known.name, "memory": memory, **sheet})

    hour.row(
        "bandwidth",
        bandwidth / sheet["bandwidth"],
        note=f"{bandwidth / 1e9:.0f} GB/s",
        **_judged(BANDWIDTH),
    )
    hour.row(
        "products in bfloat16",
        bf16 / sheet["bf16"],
        note=f"{bf16 / 1e12:.3g} TFLOP/s",
        **_judged(PRODUCTS),
    )
    hour.row(
        "products in float32",
        float32 / sheet["float32"],
        note=f"{float32 / 1e12:.3g} TFLOP/s",
        **_judged(PRODUCTS),
    )
    for masked in (False, True):
        kind = "masked_attention" if masked else "attention"
        forward, backward = _attention(device, masked, tokens=64 if hour.tiny else 4096)
        hour.row(f"{kind}", forward / sheet["bf16"], **_judged(ATTENTION[kind][0]))
        hour.row(f"{kind}_backward", backward / sheet["bf16"], **_judged(ATTENTION[kind][1]))
    one = torch.ones(1, device=device)

    def launches() -> None:
        for _ in range(1000):
            one.add_(1)

    hour.row("launch", meter.seconds(device, launches) / 1000, unit="s", expected=EAGER.launch, within=0.5)
    if device.type == "cuda":
        for pinned in (False, True):
            host = torch.empty(large // 4, dtype=torch.uint8, pin_memory=pinned)
            rate = large / 4 / meter.seconds(device, lambda host=host: copy[: large // 4].copy_(host))
            hour.row(
                f"from the host, {'pinned' if pinned else 'pageable'}", rate / 1e9, unit="GB/s", expected=25.0
            )


def _judged(expected: float) -> dict[str, float | str]:
    return {"unit": "of the data sheet", "expected": expected, "within": 0.25}


def _product(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """FLOP a second of a square matrix product."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / meter.seconds(device, lambda: left @ right, repeats=5)


def _attention(device: torch.device, masked: bool, *, tokens: int) -> tuple[float, float]:
    """FLOP a second of attention forwards, and backwards by 2.5 times the work of forwards."""
    shape, heads, width = (2, 24, tokens, 64), 24, 64
    query, key, value = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    mask = torch.ones(2, 1, 1, tokens, dtype=torch.bool, device=device) if masked else None

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, mask)

    work = 4 * 2 * heads * tokens**2 * width
    ahead = meter.seconds(device, forward)
    both = meter.seconds(device, lambda: forward().sum().backward())
    return work / ahead, 2.5 * work / max(both - ahead, 1e-9)


def _versions() -> list[str]:
    versions = [f"flowcorr {flowcorr.__version__}{_commit()}"]
    versions += [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in ("diffusers", "transformers", "peft", "accelerate", "vllm-omni", "vllm", "ray"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return versions


def _commit() -> str:
    """The commit of this checkout in words; empty without git or its folder, as on a machine that got a copy."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f" at commit {commit}" if commit else ""


def known_gpu(name: str, memory: float) -> Gpu | None:
    """The GPU whose chip, memory and, where there are several, board are those of a device that torch names so."""
    plain = name.lower().replace(" ", "")
    found = [
        gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in plain and abs(gpu.memory / memory - 1) < 0.1
    ]
    of_board = [gpu for gpu in found if gpu.name.split("-")[-1] in plain]
    return next(iter(of_board or found), None)
