"""A device that computes nothing and counts every operation; its tensors have only a shape and a dtype.

It is a `PrivateUse1` device of torch with the name `fakegpu`. Its tensors are `FakeTensor`s, so a model of any size
fits into the memory of a laptop. Code under `FakeDevice` runs unchanged, forward and backward. As on a GPU, an
operation on a CPU tensor and a device tensor fails.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from flowcorr.errors import BackendError
from flowcorr.models.quantized import QuantizedLinear
from flowcorr.plan.attention import Operator, attention
from flowcorr.plan.autocast import dropping_copies, in_low_precision
from flowcorr.plan.fake_backend import DEVICE, available, lifting_on_cpu_only, register
from flowcorr.plan.operations import Kind, Operation

_ALLOCATION = 512  # bytes: torch's CUDA allocator rounds up to multiples of this
_FREE = frozenset(  # operations that move no data
    {
        "detach",
        "empty",
        "empty_strided",
        "empty_like",
        "new_empty",
        "empty_permuted",
        "_unsafe_view",
        "lift_fresh",
    }
)
_CONVERSIONS = frozenset({"_to_copy", "copy_", "_foreach_copy_"})
_FLOPS = {  # torch lists no product in place
    **flop_registry,
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
}
_DATA_DEPENDENT = frozenset({"nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select"})


@dataclass(slots=True, kw_only=True, eq=False)
class Section:
    """Counts of one part of the program.

    Attributes:
        before, after: bytes allocated at its beginning and end.
        peaks: peak bytes allocated, by the stage named with `FakeDevice.enter_stage`.
        copies: bytes of copies of weights in another dtype, as autocast makes them, at each of these peaks.
        flops: floating point operations of matrix products, convolutions and attention.
        moved: bytes read and written by all operations.
        operations: how often each operation ran.
        host_reads: values that the host waited for, by kind and place in the source.
        uploads: copies from the host, by place. On CUDA the host also waits for a copy from memory that is not pinned.
        promotions: bytes written by operations on floating-point tensors of different dtypes, by kind and place.
    """

    before: int = 0
    after: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    flops: float = 0.0
    moved: float = 0.0
    operations: Counter[Operation] = field(default_factory=Counter)
    host_reads: Counter[tuple[str, str]] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    promotions: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def kernels(self) -> int:
        """Operations launched."""
        return self.operations.total()


class FakeDevice:
    """A context in which `fakegpu` is available and counts operations.

    The values of its tensors are unknown. Where the host reads one, it gets `True` for a bool and 1 for a number. A
    mask selects everything, its negation `~mask` selects nothing, and `unique` finds one value.

    Attributes:
        attention: what computes attention from now on.
    """

    def __init__(self) -> None:
        self.attention: Operator = "torch"
        self.allocated = self.copies = 0
        self._stage = ""
        self._sections: list[Section] = []
        self._storages: set[int] = set()
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> FakeDevice:
        register()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with contextlib.ExitStack() as entered:
            entered.enter_context(available())
            entered.enter_context(lifting_on_cpu_only())
            entered.enter_context(dropping_copies())
            entered.enter_context(self.mode)
            entered.enter_context(_Counting(self))
            entered.enter_context(_attention_of(self))
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    @contextlib.contextmanager
    def section(self) -> Iterator[Section]:
        """Count the operations of the body; sections may be nested."""
        section = Section()
        self.begin(section)
        try:
            yield section
        finally:
            self.end(section)

    def begin(self, section: Section) -> None:
        section.before = self.allocated
        self._sections.append(section)
        self._note_peak()

    def end(self, section: Section) -> None:
        section.after = self.allocated
        self._sections.remove(section)

    def enter_stage(self, name: str) -> None:
        """Record peaks under this name from now on."""
        self._stage = name
        self._note_peak()

    def place(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Replace a module's parameters and buffers by empty ones on the device; a parameter in two places stays one.

        Args:
            module: a module on any device, such as `meta`.
            dtype: the dtype of its floating-point tensors; None keeps theirs.
        """
        parameters: dict[nn.Parameter, nn.Parameter] = {}

        def placed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
            other = dtype if tensor.is_floating_point() else None
            return torch.empty(tensor.shape, dtype=other or tensor.dtype, device=DEVICE)

        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.device.type != DEVICE:
                    if parameter not in parameters:
                        parameters[parameter] = nn.Parameter(
                            placed(parameter, dtype), parameter.requires_grad
                        )
                    part._parameters[name] = parameters[parameter]
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.device.type != DEVICE:
                    scales = isinstance(part, QuantizedLinear)  # they keep their dtype
                    part._buffers[name] = placed(buffer, None if scales else dtype)

    # Called by `_Counting` ---------------------------------------------------------------------------------

    def _allocate(self, tensor: Tensor, *, is_copy: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        size = -(-storage.nbytes() // _ALLOCATION) * _ALLOCATION
        self._storages.add(key)
        copied = size if is_copy else 0
        weakref.finalize(storage, self._release, key, size, copied)
        self.allocated += size
        self.copies += copied
        self._note_peak()

    def _note_peak(self) -> None:
        for section in self._sections:
            if self.allocated > section.peaks.get(self._stage, -1):
                section.peaks[self._stage], section.copies[self._stage] = self.allocated, self.copies

    def _release(self, key: int, size: int, copied: int) -> None:
        self._storages.discard(key)
        self.allocated -= size
        self.copies -= copied

    def _read_by_host(self, kind: str) -> None:
        place = _place()
        for section in self._sections:
            section.host_reads[kind, place] += 1

    def _upload(self) -> None:
        place = _place()
        for section in self._sections:
            section.uploads[place] += 1

    def _promote(self, kind: str, size: int) -> None:
        place = _place()
        for section in self._sections:
            section.promotions[kind, place] += size

    def _run(self, operation: Operation) -> None:
        for section in self._sections:
            section.flops += operation.flops
            section.moved += operation.moved
            section.operations[operation] += 1


class _Counting(TorchDispatchMode):
    """Counts each operation, and makes up results that depend on values."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device
        self._negations = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "device":  # a query of torch, not an operation
            return func(*args, **kwargs)
        inputs = _tensors((args, tuple(kwargs.values())))
        on_device = [tensor for tensor in inputs if tensor.device.type == DEVICE]
        if on_device or name in _CONVERSIONS:
            if not all(isinstance(tensor, FakeTensor) for tensor in inputs):
                args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs))
                inputs = _tensors((args, tuple(kwargs.values())))
            for tensor in inputs:
                tensor.constant = None  # with a constant, torch would compute on the device
        if name == "_local_scalar_dense":
            return self._number(func, args[0])
        if on_device and name in _DATA_DEPENDENT:
            return self._selection(name, args[0])
        if on_device and name == "index" and any(map(_is_mask, args[1])):
            return self._masked(args[0], args[1])
        out = func(*args, **kwargs)
        if name == "bitwise_not":
            self._negations[out] = True
        outputs = _tensors((out,))
        made = [tensor for tensor in outputs if tensor.device.type == DEVICE]
        for tensor in made:
            self.device._allocate(tensor, is_copy=name == "_to_copy" and isinstance(args[0], nn.Parameter))
        if name in _CONVERSIONS:
            if on_device and not made:
                self.device._read_by_host("copy")
            elif made and inputs[-1].device.type != DEVICE:
                self.device._upload()
        elif len({tensor.dtype for tensor in on_device if tensor.is_floating_point() and tensor.dim()}) > 1:
            self.device._promote(name, sum(map(_touched, made)))
        if made and name not in _FREE and not _is_view(func):
            self._count(func, args, kwargs, on_device, out, made)
        return out

    def _fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.device.mode.from_tensor(tensor)

    def _number(self, func: Any, tensor: Tensor) -> bool | float | int:
        if tensor.device.type == DEVICE:
            self.device._read_by_host("item")
        else:
            with contextlib.suppress(DataDependentOutputException):
                return func(tensor)
        return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1

    def _selection(self, name: str, tensor: Tensor) -> Any:
        self.device._read_by_host(name)
        if name == "nonzero":
            selected = 0 if tensor in self._negations else tensor.numel()
            return torch.zeros(selected, tensor.dim(), dtype=torch.long, device=DEVICE)
        if name == "_unique2":
            places = torch.zeros(tensor.shape, dtype=torch.long, device=DEVICE)
            return tensor.flatten()[:1].clone(), places, places.flatten()[:1].clone()
        raise BackendError(
            f"flowcorr plan cannot follow torch.{name}: the shape of its result depends on values"
        )

    def _masked(self, tensor: Tensor, indices: Any) -> Tensor:
        """`tensor[mask]` as if the mask were true everywhere."""
        self.device._read_by_host("mask")
        (mask,) = indices
        return tensor.flatten(0, mask.dim() - 1).clone()

    def _count(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], out: Any, outputs: list[Tensor]
    ) -> None:
        moved = sum(map(_touched, [*inputs, *outputs]))
        operation = Operation(kind="memory", half=False, flops=0.0, moved=moved)
        if func.overloadpacket in _FLOPS:
            operation = Operation(
                kind=_kind(func.overloadpacket.__name__),
                half=next(tensor for tensor in inputs if tensor.is_floating_point()).element_size() <= 2,
                flops=_FLOPS[func.overloadpacket](*args, **kwargs, out_val=out),
                moved=moved,
            )
        self.device._run(operation)


def _tensors(values: tuple[Any, ...]) -> list[Any]:
    """The tensors in an operation's arguments or results, also those in nested sequences."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(tuple(value))
    return found


@contextlib.contextmanager
def _attention_of(device: FakeDevice) -> Iterator[None]:
    """Compute attention on the device by its operator, one that CUDA has.

    A `TorchFunctionMode` would do the same, but activation checkpointing under one aborts the process.
    """
    functional = torch.nn.functional
    of_torch = functional.scaled_dot_product_attention

    def compute(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.device.type != DEVICE:
            return of_torch(query, *args, **kwargs)
        return in_low_precision(DEVICE, attention)(device.attention, query, *args, **kwargs)

    functional.scaled_dot_product_attention = compute
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = of_torch


def _kind(name: str) -> Kind:
    if "flash" in name:
        return "attention_backward" if "backward" in name else "attention"
    if "efficient" in name:
        return "masked_attention_backward" if "backward" in name else "masked_attention"
    return "matmul"


def _touched(tensor: Tensor) -> int:
    """Bytes of a tensor in memory; an expanded axis counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _is_view(func: Any) -> bool:
    return any(
        value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns
    )


def _place() -> str:
    """The innermost line outside of torch, as `package/module.py:function`."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__ and "/torch/" not in path:
            package = path.rpartition("site-packages/")[2]
            if package == path:
                package = "flowcorr/" + path.rpartition("/flowcorr/")[2] if "/flowcorr/" in path else path
            return f"{package}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "backward pass"
