"""Registers the fake device with torch: its name, and the functions that torch calls in a device's module.

torch cannot unregister a device. Outside of `available` the device reports that it does not exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flowcorr.errors import BackendError
from flowcorr.plan import autocast

DEVICE = "fakegpu"
_STATE = {"registered": False, "available": False}
_REGISTRATIONS: list[torch.library.Library] = []


@contextlib.contextmanager
def available() -> Iterator[None]:
    """Report the device as available during the block."""
    _STATE["available"] = True
    try:
        yield
    finally:
        _STATE["available"] = False


@contextlib.contextmanager
def lifting_on_cpu_only() -> Iterator[None]:
    """Let `torch.tensor(..., device=DEVICE)` copy from a CPU tensor, where torch would allocate device memory."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def register() -> None:
    """Register the device with torch, once in a process.

    Raises:
        BackendError: this version of torch does not support devices implemented in Python.
    """
    if _STATE["registered"]:
        return
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup
    except ImportError:
        raise BackendError(
            f"flowcorr plan needs a newer torch than {torch.__version__}, which cannot run devices written in Python: "
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
    _REGISTRATIONS.extend(autocast.register(DEVICE))
    _STATE["registered"] = True


class _Backend:
    """The functions that torch calls in a device's module."""

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
    """Leave the fake device during the block, for example to build a module on torch's `meta` device."""
    return _disable_current_modes()
