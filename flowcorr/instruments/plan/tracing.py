"""Counts the memory and arithmetic of real code on torch's `meta` device: tensors with a layout and without values.

A model of any size fits a laptop there. Attention stores no scores, as on a GPU, and memory that a GPU's kernels take
for themselves is added. Blocks that are alike are built three times, and counted as often as the real model has
them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.fx.experimental import _config as shapes
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from flowcorr.errors import BackendError
from flowcorr.instruments.plan.architecture import Kind

ALLOCATION = 512
"""torch's CUDA allocator rounds up to multiples of so many bytes."""

_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.empty_permuted)
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu  # of torch's fused ones, the one with any mask
_FLOPS = {  # torch lists neither this attention, which counts as that on GPUs, nor products in place
    **flop_registry,
    _aten.addmm_: flop_registry[_aten.addmm],
    _ATTENTION: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Memory and arithmetic of one part of a step.

    Attributes:
        peak: bytes above those at the beginning.
        flops: floating point operations of matrix products, convolutions and attention.
        moved: bytes that all operations read and write.
        kernels: operations launched.
    """

    peak: float = 0.0
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


@dataclass(slots=True)
class Section:
    """One part of the program; `work` is counted when it has ended."""

    work: Work = field(default_factory=Work)


@contextlib.contextmanager
def tracing(kinds: Iterable[Kind] = ()) -> Iterator[Tracer]:
    """Count the operations of the body on tensors of the `meta` device, with fused attention.

    A mask selects everything there, and a number that the program reads is 1, or `True`.

    Args:
        kinds: blocks that count as often as the real model has them; each model is traced in one context.
    """
    plain = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _fused(plain)
    try:
        with shapes.patch(meta_nonzero_assume_all_nonzero=True), Tracer() as tracer:  # type: ignore[attr-defined]
            for blocks, depth in kinds:
                tracer.repeat(blocks, depth)
            yield tracer
    finally:
        functional.scaled_dot_product_attention = plain


class Tracer(TorchDispatchMode):
    """Counts operations on tensors of the `meta` device; see `tracing`.

    Attributes:
        allocated: bytes of live tensors that operations made.
        peak: the most of them since the beginning of the section.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.peak = 0.0
        self._flops = self._moved = self._kernels = 0.0
        self._live: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._times = 1
        self._in_backward = False
        self._held = 0.0

    @contextlib.contextmanager
    def section(self) -> Iterator[Section]:
        """Count the operations of the body."""
        section = Section()
        begun = self.peak = self.allocated
        self._flops = self._moved = self._kernels = self._held = 0.0
        yield section
        self.allocated -= self._held
        section.work = Work(
            peak=self.peak - begun, flops=self._flops, moved=self._moved, kernels=self._kernels
        )

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss; each gradient of a parameter is freed when it is complete."""
        self._in_backward = True
        torch.autograd.backward(loss)
        self._in_backward = False

    def hold(self, size: float) -> None:
        """Count so many bytes more, or less, from now on."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def repeat(self, blocks: Sequence[nn.Module], depth: int) -> None:
        """Count the middle one of `blocks`, which run one after the other, as often as `depth` has more than these.

        Its arithmetic counts that often, forwards and backwards. The bytes that are held from its beginning to that of
        the last block are counted for all, from there until its backward pass has ended, or the section.
        """
        more = depth - len(blocks)
        if more <= 0:
            return
        middle, last = blocks[-2:]
        begun, inputs = 0.0, list[Tensor]()

        def count(times: int) -> None:
            self._times = times

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal begun
            if not self._in_backward:  # in which checkpointing computes blocks again
                begun = self.allocated
                count(1 + more)

        def end(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            nonlocal inputs
            if not self._in_backward:
                count(1)
                inputs = _with_gradient((*args, *kwargs.values()))
                made = _with_gradient((outputs,))
                if made:
                    register_multi_grad_hook(made, lambda gradient: count(1 + more), mode="any")

        def hold(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal inputs
            if self._in_backward:
                return
            held = more * (self.allocated - begun)
            self.hold(held)

            def end_backward(gradient: Tensor) -> None:
                count(1)
                self.hold(-held)

            # The engine computes a block's nodes before any of the block before it.
            if inputs:
                register_multi_grad_hook(inputs, end_backward, mode="any")
            else:
                self._held += held
            inputs = []

        middle.register_forward_pre_hook(begin, with_kwargs=True)
        middle.register_forward_hook(end, with_kwargs=True)
        last.register_forward_pre_hook(hold, with_kwargs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        results = _compute(func, args, kwargs)
        inputs, outputs = _tensors((*args, *kwargs.values())), _tensors((results,))
        if not any(tensor.is_meta for tensor in (*inputs, *outputs)):
            return results  # what known numbers give counts nothing
        memory = {id(tensor.untyped_storage()) for tensor in inputs}
        is_new = bool(outputs) and memory.isdisjoint(id(tensor.untyped_storage()) for tensor in outputs)
        written = {id(tensor) for tensor in inputs}
        is_view = bool(outputs) and not is_new and written.isdisjoint(map(id, outputs))
        if is_new:
            for tensor in outputs:
                self._allocate(tensor.untyped_storage())
        packet = func.overloadpacket
        self.peak = max(self.peak, self.allocated + _workspace(packet, args, kwargs))
        if packet in _FLOPS:
            self._flops += self._times * _FLOPS[packet](*args, **kwargs, out_val=results)
        if not is_view and packet not in _EMPTY:
            self._moved += self._times * sum(map(_touched, (*inputs, *outputs)))
            self._kernels += self._times
        return results

    def _allocate(self, memory: torch.UntypedStorage) -> None:
        size = -(-memory.nbytes() // ALLOCATION) * ALLOCATION
        self._live[weakref.ref(memory, self._release)] = size
        self.hold(size)

    def _release(self, memory: weakref.ref[torch.UntypedStorage]) -> None:
        self.allocated -= self._live.pop(memory)


def _compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of an operation on `meta`; a number that is read is 1."""
    packet = func.overloadpacket
    if packet is _aten._local_scalar_dense and args[0].is_meta:
        return torch.ones((), dtype=args[0].dtype).item()
    try:
        return func(*args, **kwargs)
    except NotImplementedError as error:
        raise BackendError(
            f"flowcorr plan cannot follow torch.{packet.__name__}: the shape of its result depends on values"
        ) from error


def _fused(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention that stores no scores, in place of torch's `plain` one, which does so on `meta`."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not query.is_meta or query.dim() != 4:
            return plain(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            heads = query.shape[1]
            key, value = (side.repeat_interleave(heads // side.shape[1], 1) for side in (key, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
        made = _ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
        return made[0]

    return attention


def _workspace(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Bytes of a GPU kernel's workspace, without its inputs and outputs.

    A convolution turns the channels of its input to the end. Attention under a mask whose rows are not contiguous, as
    T5's biases are in transformers 5.17, has no fused kernel: it computes in float32 and stores the scores twice. So
    decoders' peaks, and those of T5, are planned at 0.94 of what an H200 showed.
    """
    if packet is _aten.convolution:
        return args[0].nbytes
    mask = kwargs.get("attn_mask")
    if packet is _ATTENTION and mask is not None and mask.stride(-1) != 1:
        query, key, value = args[:3]
        scores = query.numel() // query.shape[-1] * key.shape[-2]
        return 4 * (2 * scores + query.numel() + key.numel() + value.numel())
    return 0.0


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values, including nested sequences."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(value)
    return tensors


def _with_gradient(values: Iterable[Any]) -> list[Tensor]:
    return [tensor for tensor in _tensors(values) if tensor.requires_grad]


def _touched(tensor: Tensor) -> int:
    """Bytes of a tensor in memory; an expanded axis counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count
