"""Tensors of a CPU that have a layout and no values, and what operations make of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_META = torch.device("meta")


class Valueless(Tensor):
    """A tensor of a CPU that has a layout and no values; torch's `FakeTensor` takes five times as long an operation.

    Attributes:
        on_meta: the tensor of this layout on torch's `meta` device, on which operations are computed.
        truth: what a program reads from it as a bool.
    """

    on_meta: Tensor
    truth = True

    @staticmethod
    def __new__(cls, on_meta: Tensor) -> Valueless:
        made: Valueless = Tensor._make_wrapper_subclass(
            cls,
            on_meta.shape,
            strides=on_meta.stride(),
            storage_offset=on_meta.storage_offset(),
            dtype=on_meta.dtype,
            device=torch.device("cpu"),
        )
        made.on_meta = on_meta
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return compute(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _set_data(self, value)
        self.on_meta = on_meta(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def tolist(self) -> Any:
        return [part.tolist() for part in self] if self.dim() else self.item()


_set_data: Callable[[Tensor, Tensor], None] = vars(torch._C.TensorBase)["data"].__set__


class Layout(NamedTuple):
    """All that a tensor without values has."""

    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, results: Any) -> Any:
        """The layouts of an operation's results, in place of the tensors."""
        if isinstance(results, Tensor):
            return cls(results.shape, results.stride(), results.dtype)
        return type(results)(map(cls.of, results)) if isinstance(results, (list, tuple)) else results


def make(layouts: Any) -> Any:
    """New tensors in place of their layouts."""
    if isinstance(layouts, Layout):
        shape, strides, dtype = layouts
        return Valueless(torch.empty_strided(shape, strides, dtype=dtype, device=_META))
    return type(layouts)(map(make, layouts)) if isinstance(layouts, (list, tuple)) else layouts


def signature(values: Iterable[Any]) -> tuple[Any, ...]:
    """What an operation's arguments tell of its results: layouts of tensors, and other values with their types."""
    return tuple([
        (value.shape, value.stride(), value.dtype, has_values(value))
        if isinstance(value, Tensor)
        else signature(value)
        if isinstance(value, (list, tuple))
        else (type(value), value)
        for value in values
    ])  # fmt: skip


def tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors in an operation's arguments or results, also those in nested sequences."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _SEQUENCES):
            found += tensors(value)
    return found


_SEQUENCES: tuple[type[Iterable[Any]], ...] = (list, tuple, type({}.values()))


def has_values(tensor: Tensor) -> bool:
    """Whether operations on a tensor can be computed."""
    return not isinstance(tensor, Valueless) and not tensor.is_meta


def storage(tensor: Tensor) -> torch.UntypedStorage:
    """The memory of a tensor, which its views share."""
    return (tensor.on_meta if isinstance(tensor, Valueless) else tensor).untyped_storage()


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of one of torch's operations; of one that writes, the arguments that it writes into."""
    schema = func._schema
    if torch.Tag.inplace_view in func.tags:
        func(*on_meta(args), **kwargs)
        args[0].data = Valueless(args[0].on_meta)
    if schema.is_mutable:
        given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
        written = [
            given[argument.name]
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return (written[0] if len(written) == 1 else tuple(written)) if schema.returns else None
    options = {name: on_meta(value) for name, value in kwargs.items()}
    if "generator" in options:
        options["generator"] = None
    if _takes_device(func):
        options["device"] = _META
    return _from_meta(func(*on_meta(args), **options))


def on_meta(values: Any) -> Any:
    """Arguments, with each tensor on torch's `meta` device."""
    if isinstance(values, Tensor):
        return values.on_meta if isinstance(values, Valueless) else values.to(_META)
    return type(values)(map(on_meta, values)) if isinstance(values, (list, tuple)) else values


def _from_meta(results: Any) -> Any:
    if isinstance(results, Tensor):
        return Valueless(results)
    return type(results)(map(_from_meta, results)) if isinstance(results, (list, tuple)) else results


@functools.cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)
