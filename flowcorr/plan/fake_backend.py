"""The fake device's registration with torch: its name, and the functions that torch calls of a device's module.

The name and its backend stay registered in the process. Outside of `available` they say that there is no such device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flowcorr.errors import BackendError

DEVICE = "fakegpu"
_STATE = {"registered": False, "available": False}


@contextlib.contextmanager
def available() -> Iterator[None]:
    """Let the device be there."""
    _STATE["available"] = True
    try:
        yield
    finally:
        _STATE["available"] = False


@contextlib.contextmanager
def lifting_on_cpu_only() -> Iterator[None]:
    """Let `torch.tensor(..., device=DEVICE)` make a CPU tensor and copy it, where torch would allocate for real."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def register() -> None:
    """Register the device with torch, once in a process.

    Raises:
        BackendError: this torch has no devices that Python implements.
    """
    if _STATE["registered"]:
        return
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup
    except ImportError:
        raise BackendError(
            f"flowcorr plan needs a torch that lets Python implement a device; {torch.__version__} does not: "
            "pip install -U torch"
        ) from None

    class Hook(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return _STATE["available"]

        def has_primary_context(self, index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    setup(DEVICE, backend_module=_Backend, hook=Hook())
    _STATE["registered"] = True


class _Backend:
    """What torch asks of a device's module."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return _STATE["available"]

    @staticmethod
    def device_count() -> int:
        return int(_STATE["available"])

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def get_rng_state(device: int = 0) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def set_rng_state(state: Tensor, device: int = 0) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def synchronize(device: Any = None) -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass

    device: Callable[..., contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def without_device() -> contextlib.AbstractContextManager[Any]:
    """Leave the fake device for a while, as to build a module on torch's `meta` device."""
    return _disable_current_modes()
