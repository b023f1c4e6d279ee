"""Time, memory and reads by the host of a call on a device."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_SYNCHRONIZING = "called a synchronizing CUDA operation"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, call: Callable[[], object], *, repeats: int = 3) -> float:
    """Seconds of a call, the median of `repeats` after one that does not count."""
    seconds_once(device, call)
    return statistics.median(seconds_once(device, call) for _ in range(repeats))


def seconds_once(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds of one call."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


def allocated(device: torch.device) -> int:
    """Bytes of live tensors on a GPU; on a CPU, which does not count them, of all tensors that Python knows."""
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB a stream and thread, which torch counts as tensors
        return torch.cuda.memory_allocated(device)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    }
    return sum(storages.values())


def peak(device: torch.device, call: Callable[[], object]) -> float:
    """Most bytes that a call holds at once above those before it."""
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    memory = [event["args"] for event in events if event.get("name") == "[memory]"]
    before = memory[0]["Total Allocated"] - memory[0]["Bytes"]
    return max(event["Total Allocated"] for event in memory) - before


def host_reads(device: torch.device, call: Callable[[], object]) -> Counter[str] | None:
    """Places at which the host waits for the device in a call, and how often; None on a CPU.

    torch counts most operations that wait, also a tensor that is made from numbers of the host.
    """
    if device.type != "cuda":
        call()
        return None
    synchronize(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [entry for entry in caught if _SYNCHRONIZING in str(entry.message)]
    return Counter(f"{'/'.join(Path(entry.filename).parts[-2:])}:{entry.lineno}" for entry in found)


def kernel_shares(device: torch.device, call: Callable[[], object], *, most: int) -> dict[str, float]:
    """The share of the device's time that each of the `most` longest kernels takes in a call."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        call()
        synchronize(device)
    times: Counter[str] = Counter()
    for event in profiler.key_averages():
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        times[event.key] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    total = sum(times.values()) or 1.0
    return {name: spent / total for name, spent in times.most_common(most)}


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether products and convolutions in float32 may round their inputs to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
