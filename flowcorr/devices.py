"""The devices of this machine, by the names that configurations give them."""

from __future__ import annotations

import torch

from flowcorr.device_names import check_device_name
from flowcorr.errors import ConfigError


def named_device(key: str, name: str) -> torch.device:
    """The torch device called `name`; `auto` takes CUDA if there is any.

    Args:
        key: the configuration key that named it, for messages.
        name: `auto`, or what `torch.device` takes.

    Raises:
        ConfigError: torch knows no such device, or this machine lacks it.
    """
    check_device_name(key, name)
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{key}={name!r} cannot be used here ({reason}); use auto, cpu or cuda") from error
    return device


def free_memory(device: torch.device) -> int:
    """Free bytes of a device; on a CPU, the memory that the system can give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return int(psutil.virtual_memory().available)


def facts(device: torch.device) -> dict[str, str | int]:
    """A device's name and memory in bytes, for the record of a run."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"device": properties.name, "memory": properties.total_memory}
    import psutil

    return {"device": device.type, "memory": psutil.virtual_memory().total}


def empty_cache(device: torch.device) -> None:
    """Release torch's cached GPU memory to other processes, such as an engine on the same GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def keep_float32() -> None:
    """Disable TF32 for float32 convolutions; torch allows it for them by default, and not for matrix products.

    With TF32, log-probs of two stacks in float32 differ with their choice of kernels.
    """
    torch.backends.cudnn.allow_tf32 = False
