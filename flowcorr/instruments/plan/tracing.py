"""Runs real code on tensors without values, and counts the memory and arithmetic that it would take.

The tensors are those of a CPU, and have a layout only, so a model of any size fits a laptop. Their attention stores no
scores, as on a GPU; what a GPU's kernels need beside their results is added. Blocks that are alike are built three
times, and counted as often as the real model has them. Operations on known numbers alone are computed, not counted.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from flowcorr.algorithm import noise_floor
from flowcorr.errors import BackendError
from flowcorr.instruments.plan.valueless import (
    Layout,
    Valueless,
    compute,
    has_values,
    make,
    signature,
    storage,
    tensors,
)
from flowcorr.models.quantized import QuantizedLinear

ALLOCATION = 512
"""torch's CUDA allocator rounds up to multiples of so many bytes."""

_aten = torch.ops.aten
_FREE = frozenset({
    "detach", "empty", "empty_strided", "empty_like", "new_empty", "empty_permuted", "_unsafe_view", "lift_fresh",
})  # fmt: skip
_FLOPS = {  # torch lists neither its attention on CPUs, which counts as that on GPUs, nor products in place
    **flop_registry,
    _aten.addmm_: flop_registry[_aten.addmm],
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Memory and arithmetic of one part of a step.

    Attributes:
        peak: bytes above those at the beginning.
        copies: bytes at this peak of autocast's copies of weights, which do not grow with the rows of a pass.
        flops: floating point operations of matrix products, convolutions and attention.
        moved: bytes that all operations read and write.
        kernels: operations launched.
    """

    peak: float = 0.0
    copies: float = 0.0
    flops: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0

    def times(self, count: float) -> Work:
        """This work `count` times in turn."""
        return replace(self, flops=count * self.flops, moved=count * self.moved, kernels=count * self.kernels)

    def then(self, other: Work) -> Work:
        """This work, then `other`; the peak is the higher one."""
        return Work(
            peak=max(self.peak, other.peak),
            flops=self.flops + other.flops,
            moved=self.moved + other.moved,
            kernels=self.kernels + other.kernels,
        )


class Section:
    """Counts of one part of the program; `work` has them when it has ended."""

    def __init__(self) -> None:
        self.before = self.peak = self.after = 0.0
        self.copies = self.held = 0.0
        self.flops = self.moved = self.kernels = 0.0

    @property
    def work(self) -> Work:
        return Work(
            peak=self.peak - self.before,
            copies=self.copies,
            flops=self.flops,
            moved=self.moved,
            kernels=self.kernels,
        )


class Tracer:
    """A context in which tensors have no values, and operations are counted.

    Where the program reads a value it gets 1, or `True`, but of `any` and of a negation `False`: checks hold. So a mask
    selects everything, its negation `~mask` nothing, and `unique` finds one value.

    Attributes:
        allocated: bytes of live tensors.
    """

    def __init__(self) -> None:
        self.allocated = self.copies = 0.0
        self._times = 1
        self._keeps_copies = False
        self._section = Section()
        self._sizes: dict[int, int] = {}
        self._counting = _Counting(self)

    def __enter__(self) -> Tracer:
        self._counting.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._counting.__exit__(*error)
        for cached in (noise_floor.edges, noise_floor.interval_ranks):
            cached.cache_clear()  # of results without values

    @contextlib.contextmanager
    def section(self, section: Section | None = None) -> Iterator[Section]:
        """Count the operations of the body, in a new section or in one that is given."""
        section = section or Section()
        section.before = section.peak = self.allocated
        outer, self._section = self._section, section
        try:
            yield section
        finally:
            self.allocated -= section.held
            section.after = self.allocated
            self._section = outer

    def place(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Replace a module's parameters and buffers by tensors without values; a parameter in two places stays one.

        Args:
            module: a module on torch's `meta` device.
            dtype: the dtype of its floating-point tensors.
        """
        parameters: dict[nn.Parameter, nn.Parameter] = {}

        def placed(tensor: Tensor, keeps_dtype: bool = False) -> Tensor:
            cast = tensor.is_floating_point() and not keeps_dtype
            return torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype)

        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    if parameter not in parameters:
                        parameters[parameter] = nn.Parameter(placed(parameter), parameter.requires_grad)
                    part._parameters[name] = parameters[parameter]
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = placed(buffer, isinstance(part, QuantizedLinear))

    def repeat(self, blocks: Sequence[nn.Module], depth: int) -> None:
        """Count the middle one of `blocks`, which run one after the other, as often as `depth` has more than these.

        Its arithmetic counts that often, forwards and backwards. The bytes that are held from its beginning to that of
        the last block are counted for all, from there until its backward pass has ended.
        """
        more = depth - len(blocks)
        if more <= 0:
            return
        middle, last = blocks[-2:]
        state: dict[str, Any] = {}

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not _in_backward():
                self._times = 1 + more
                self._keeps_copies = torch.is_autocast_enabled("cpu")  # until autocast ends
                state.update(begun=self.allocated, copied=self.copies, outer=self.new_peak(0.0))

        def end(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            if _in_backward():
                return
            self._times = 1
            state["highest"] = self.new_peak(state["outer"])
            state["graph"] = _with_gradient((args, kwargs)), _with_gradient(outputs)

        def hold(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _in_backward():
                return
            held = more * (self.allocated - self.copies - state["begun"] + state["copied"])
            self._section.peak = max(self._section.peak, state["highest"] + held)
            inputs, outputs = state.pop("graph")
            self.hold(held)
            if not outputs:
                self._section.held += held
                return

            def begin_backward(gradients: Any) -> None:
                self._times = 1 + more
                torch.autograd.Variable._execution_engine.queue_callback(end_backward)

            ended: list[bool] = []

            def end_backward(gradients: Any = None) -> None:
                if not ended:
                    ended.append(True)
                    self._times = 1
                    self.hold(-held)

            # The engine computes a block's nodes before any of the block before it.
            register_multi_grad_hook(outputs, begin_backward, mode="any")
            if inputs:
                register_multi_grad_hook(inputs, end_backward, mode="any")

        middle.register_forward_pre_hook(begin, with_kwargs=True)
        middle.register_forward_hook(end, with_kwargs=True)
        last.register_forward_pre_hook(hold, with_kwargs=True)

    def new_peak(self, least: float) -> float:
        """The section's peak so far, which begins anew at `least` or at the live tensors."""
        section = self._section
        before, section.peak = section.peak, max(section.peak if least else 0.0, least, self.allocated)
        return before

    def pass_by(self, size: float) -> None:
        """Count so many bytes that an operation takes while it computes."""
        self.hold(size)
        self.hold(-size)

    def hold(self, size: float) -> None:
        """Count so many bytes more, or less, from now on."""
        self.allocated += size
        self._note_peak()

    @contextlib.contextmanager
    def leaving_out_gradients(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Leave gradients of these parameters out of `allocated`: all are there from the second micro-batch on."""

        def leave_out(parameter: Tensor) -> None:
            assert parameter.grad is not None
            key = storage(parameter.grad)._cdata
            self.allocated -= self._sizes[key]
            self._sizes[key] = 0

        handles = [
            parameter.register_post_accumulate_grad_hook(leave_out)
            for parameter in parameters
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # Called by `_Counting` ---------------------------------------------------------------------------------

    def _allocate(self, tensor: Tensor, *, is_copy: bool) -> None:
        memory = storage(tensor)
        key = memory._cdata
        if key in self._sizes:
            return
        size = -(-memory.nbytes() // ALLOCATION) * ALLOCATION
        if is_copy and self._keeps_copies and not _in_backward():
            size *= self._times
        self._sizes[key] = size
        weakref.finalize(memory, self._release, key, is_copy)
        self.allocated += size
        if is_copy:
            self.copies += size
        self._note_peak()

    def _release(self, key: int, is_copy: bool) -> None:
        size = self._sizes.pop(key, 0)
        self.allocated -= size
        if is_copy:
            self.copies -= size

    def _note_peak(self) -> None:
        if self.allocated > self._section.peak:
            self._section.peak, self._section.copies = self.allocated, self.copies

    def _run(self, operation: _Operation) -> None:
        if operation.workspace:
            self.pass_by(operation.workspace)
        section, times = self._section, self._times
        section.flops += times * operation.flops
        section.moved += times * operation.moved
        section.kernels += times * operation.kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """An operation on arguments of given layouts.

    Attributes:
        makes: the layouts of its results; None where they share memory with the arguments.
        workspace: bytes that it takes beside its arguments and results.
        flops, moved, kernels: see `Work`.
    """

    makes: Any
    workspace: float
    flops: float
    moved: float
    kernels: int


class _Counting(TorchDispatchMode):
    """Counts each operation, and makes up results that depend on values."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self._known: dict[Any, _Operation] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        key = func, signature(args), signature(kwargs.items())
        operation = self._known.get(key)
        if operation is None:
            inputs = tensors((args, kwargs.values()))
            if inputs and all(map(has_values, inputs)):
                return func(*args, **kwargs)
            if name in _BY_VALUES:
                return _BY_VALUES[name](*args)
            if name == "index" and any(
                isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
            ):
                (mask,) = args[1]  # as if it were true everywhere
                return args[0].flatten(0, mask.dim() - 1).clone()
            results = compute(func, args, kwargs)
            operation = self._known[key] = _operation(func, args, kwargs, inputs, results)
        elif operation.makes is None:
            results = compute(func, args, kwargs)
        else:
            results = make(operation.makes)
        if name in ("any", "bitwise_not"):
            results.truth = False
        is_copy = name == "_to_copy" and isinstance(args[0], nn.Parameter)
        for tensor in tensors((results,)):
            self.tracer._allocate(tensor, is_copy=is_copy)
        self.tracer._run(operation)
        return results


def _operation(func: Any, args: Any, kwargs: Any, inputs: list[Tensor], results: Any) -> _Operation:
    outputs = tensors((results,))
    held = {storage(tensor)._cdata for tensor in inputs}
    is_new = bool(outputs) and held.isdisjoint(storage(tensor)._cdata for tensor in outputs)
    packet = func.overloadpacket
    computes = packet.__name__ not in _FREE and not _is_view(func)
    return _Operation(
        makes=Layout.of(results) if is_new else None,
        workspace=_workspace(packet, args, kwargs),
        flops=_FLOPS[packet](*args, **kwargs, out_val=results) if computes and packet in _FLOPS else 0.0,
        moved=sum(map(_touched, (*inputs, *outputs))) if computes else 0.0,
        kernels=int(computes),
    )


def _number(tensor: Valueless) -> bool | float | int:
    if tensor.dtype == torch.bool:
        return tensor.truth
    return 1.0 if tensor.is_floating_point() else 1


def _nonzero(mask: Valueless) -> Tensor:
    return make(Layout((mask.numel() if mask.truth else 0, mask.dim()), (1, 1), torch.long))


def _unique(tensor: Valueless, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    one = Layout((1,), (1,), torch.long)
    return make((one._replace(dtype=tensor.dtype), Layout.of(tensor)._replace(dtype=torch.long), one))


def _not_followed(name: str, *_: Any) -> None:
    raise BackendError(f"flowcorr plan cannot follow torch.{name}: the shape of its result depends on values")


_BY_VALUES: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": _number,
    "nonzero": _nonzero,
    "_unique2": _unique,
    **{name: partial(_not_followed, name) for name in ("unique_dim", "unique_consecutive", "masked_select")},
}
"""What operations return whose results depend on values."""


def _workspace(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Bytes that a GPU's kernel takes beside its inputs and outputs.

    A convolution turns the channels of its input to the end. Attention under a mask whose rows are not contiguous, as
    T5's biases are in transformers 5.17, has no fused kernel: it computes in float32 and stores the scores twice. So
    decoders' peaks, and those of T5, are planned at 0.94 of what an H200 showed.
    """
    if packet is _aten.convolution:
        return args[0].nbytes
    mask = kwargs.get("attn_mask")
    if (
        packet is _aten._scaled_dot_product_flash_attention_for_cpu
        and mask is not None
        and mask.stride(-1) != 1
    ):
        query, key, value = args[:3]
        scores = query.numel() // query.shape[-1] * key.shape[-2]
        return 4 * (2 * scores + query.numel() + key.numel() + value.numel())
    return 0.0


def _in_backward() -> bool:
    """Whether a backward pass computes now, in which activation checkpointing computes blocks again."""
    return torch._C._current_graph_task_id() >= 0


def _with_gradient(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.requires_grad]


def _touched(tensor: Tensor) -> int:
    """Bytes of a tensor in memory; an expanded axis counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


@functools.cache
def _is_view(func: Any) -> bool:
    return any(
        value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns
    )
