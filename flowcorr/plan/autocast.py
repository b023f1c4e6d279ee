"""Autocast on the fake device, as CUDA has it: matrix products in bfloat16; norms, softmax and sums in float32.

Source of the operations: "Autocast Op Reference", https://docs.pytorch.org/docs/stable/amp.html, as far as transformers
call them. Every other operation computes in the dtype of its inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_LOW = (
    "conv1d", "conv2d", "conv3d", "convolution", "linear", "prelu",
    "addmm", "baddbmm", "bmm", "einsum", "matmul", "mm",
)  # fmt: skip
_FLOAT32 = (
    "exp", "log", "reciprocal", "rsqrt", "softplus", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm",
)  # fmt: skip
_RETURNING_FLOAT32 = (  # these take the dtype of their result
    "softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "prod", "prod.dim_int", "cumsum", "cumprod",
    "linalg_vector_norm",
)  # fmt: skip
_KEY = "AutocastPrivateUse1"
_copies = WeakIdKeyDictionary()  # of trained weights, in bfloat16: kept until autocast ends, as torch does


def register(device: str) -> list[torch.library.Library]:
    """Register the operations with torch, for the device of this name.

    Returns:
        The registrations, which last as long as these objects.
    """
    others, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    for name in _LOW:
        library.impl(name, in_low_precision(device, _operation(name)), _KEY)
    for name in _FLOAT32:
        library.impl(name, _in_float32(device, _operation(name)), _KEY)
    for name in _RETURNING_FLOAT32:
        library.impl(name, _to_float32(device, _operation(name)), _KEY)
    return [others, library]


def in_low_precision(device: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute` on inputs in autocast's dtype, where autocast is on.

    As in torch, a trained float32 weight is copied once until autocast ends. A frozen one is copied for each use.
    """

    def cast(tensor: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        if not _eligible(tensor, device) or tensor.dtype == dtype:
            return tensor
        if not (tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf):
            return tensor.to(dtype)
        if tensor not in _copies:
            _copies[tensor] = tensor.to(dtype)
        return _copies[tensor]

    return _on_cast_inputs(device, compute, cast)


@contextlib.contextmanager
def dropping_copies() -> Iterator[None]:
    """Drop the copies of weights wherever torch clears its own cache of them: at the end of the outermost autocast."""
    of_torch = torch.clear_autocast_cache

    def clear() -> None:
        _copies.clear()
        of_torch()

    torch.clear_autocast_cache = clear
    try:
        yield
    finally:
        torch.clear_autocast_cache = of_torch
        _copies.clear()


def _in_float32(device: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    return _on_cast_inputs(
        device, compute, lambda tensor: tensor.float() if _eligible(tensor, device) else tensor
    )


def _to_float32(device: str, operation: Any) -> Callable[..., Any]:
    place = [argument.name for argument in operation._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("dtype")
        if given is None and _eligible(args[0], device):
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        with torch.autocast(device, enabled=False):
            return operation(*args, **kwargs)

    return kernel


def _on_cast_inputs(
    device: str, compute: Callable[..., Any], cast: Callable[[Tensor], Tensor]
) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return compute(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        with torch.autocast(device, enabled=False):
            return compute(*args, **kwargs)

    return kernel


def _eligible(tensor: Tensor, device: str) -> bool:
    return tensor.device.type == device and tensor.is_floating_point() and tensor.dtype != torch.float64


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")
