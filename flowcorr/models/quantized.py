"""Frozen linear layers with weights of 4 or 8 bits, in a transformer that is trained by an adapter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowcorr.errors import ConfigError, MissingExtraError
from flowcorr.models.base import repeated_blocks

NF4_BLOCKS = (64, 32)
"""Weights that share a scale in NF4, the preferred number first."""


@torch.library.custom_op("flowcorr::quantize_nf4", mutates_args=())
def quantize_nf4(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """NF4 codes of a matrix, arXiv:2305.14314, by bitsandbytes.

    Args:
        weight: `[out, in]`, float32, bfloat16 or float16.
        block: weights of a row that share a scale; it divides `in`.

    Returns:
        Codes `[out, in / 2]` uint8, the first of two in the high bits; scales `[out, in / block]` float32.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    try:
        from bitsandbytes import functional as bnb
    except ImportError as error:
        raise MissingExtraError("model.quantization=nf4", "bitsandbytes", "quantized", error) from error
    codes, state = bnb.quantize_4bit(weight.contiguous(), blocksize=block, quant_type="nf4")
    return codes.view(len(weight), -1), state.absmax.view(len(weight), -1)


@quantize_nf4.register_fake
def _(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    rows, width = weight.shape
    codes = weight.new_empty((rows, width // 2), dtype=torch.uint8)
    return codes, weight.new_empty((rows, width // block), dtype=torch.float32)


@torch.library.custom_op("flowcorr::dequantize_nf4", mutates_args=())
def dequantize_nf4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix `[out, in]` in `dtype` from the codes and scales that `quantize_nf4` returns."""
    import bitsandbytes  # noqa: F401 (it registers the operator)

    rows, width = len(codes), 2 * codes.shape[1]
    block = width // scales.shape[1]
    # One block a row: with several, its kernel for CPUs misreads scales where a row is no multiple of the block.
    shape = (rows * width // block, block)
    weight = torch.ops.bitsandbytes.dequantize_4bit(codes, scales.flatten(), block, "nf4", shape, dtype)
    return weight.view(rows, width)


@dequantize_nf4.register_fake
def _(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((len(codes), 2 * codes.shape[1]), dtype=dtype)


class _NF4Product(torch.autograd.Function):
    """`inputs @ weight.T + bias`. Backward dequantizes again, so that no graph holds a dequantized weight."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return functional.linear(inputs, dequantize_nf4(codes, scales, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return gradient @ dequantize_nf4(*ctx.saved_tensors, gradient.dtype), None, None, None


class _Int8Product(torch.autograd.Function):
    """`inputs @ weight.T + bias` for int8 codes, scaled after the product, since bfloat16 holds the codes exactly."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales)
        product = functional.linear(inputs, codes.to(inputs.dtype))
        scaled = (product * scales.flatten()).to(product.dtype)
        return scaled if bias is None else scaled + bias.to(scaled.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scales = ctx.saved_tensors
        (gradient,) = gradients
        scaled = (gradient * scales.flatten()).to(gradient.dtype)
        return scaled @ codes.to(gradient.dtype), None, None, None


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with codes as its `weight`; peft adapts it as any linear layer.

    Args:
        linear: the layer that it replaces.
        codes: integers, one or two a byte.
        scales: float32; they keep that dtype when the module is converted.

    Attributes:
        dtype: of the replaced weight.
    """

    dtype: torch.dtype
    scales: Tensor

    def __init__(self, linear: nn.Linear, codes: Tensor, scales: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight `[out, in]` that the codes stand for."""
        raise NotImplementedError

    def whole(self) -> nn.Linear:
        """A plain layer with the dequantized weight."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        plain.weight = nn.Parameter(self.dequantized(self.dtype), requires_grad=False)
        plain.bias = self.bias
        return plain

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        scales = self.scales
        super()._apply(fn, recurse)
        self.scales = scales.to(self.scales.device)
        return self


class NF4Linear(QuantizedLinear):
    """4 bits a weight, and a float32 scale for each block of a row."""

    @classmethod
    def of(cls, linear: nn.Linear, block: int) -> NF4Linear:
        """The layer with its weight in NF4."""
        return cls(linear, *quantize_nf4(linear.weight.detach(), block))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return dequantize_nf4(self.weight.detach(), self.scales, dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return _NF4Product.apply(inputs, self.weight, self.scales, self.bias)


class Int8Linear(QuantizedLinear):
    """8 bits a weight, symmetric, and a float32 scale for each output channel; activations are not rounded."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """The layer with its weight in integers."""
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return cls(linear, (weight / scales).round().to(torch.int8), scales)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return (self.weight.detach() * self.scales).to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return _Int8Product.apply(inputs, self.weight, self.scales, self.bias)


def quantize_blocks(
    transformer: nn.Module, quantization: str, device: torch.device | str | None = None
) -> None:
    """Replace the linear layers of the transformer's blocks, each of which goes to the device by itself.

    Embedders and the layers behind the last block keep their precision, and stay where they are.

    Args:
        transformer: frozen, in host memory or on the device.
        quantization: `nf4` or `int8`.
        device: where layers are quantized and stay; None leaves each where it is.

    Raises:
        ConfigError: the transformer has no blocks, or the width of a layer does not fit NF4.
        MissingExtraError: bitsandbytes is not installed.
    """
    blocks = repeated_blocks(transformer)
    key = f"model.quantization={quantization}"
    if not blocks:
        raise ConfigError(
            f"{key} needs a transformer with lists of blocks; {type(transformer).__name__} has none"
        )
    widths = {
        name: layer.in_features
        for block in blocks
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear)
    }
    size = next((size for size in NF4_BLOCKS if all(width % size == 0 for width in widths.values())), None)
    if quantization == "nf4" and size is None:
        name, width = next((name, width) for name, width in widths.items() if width % NF4_BLOCKS[-1])
        raise ConfigError(
            f"{key}: {NF4_BLOCKS[-1]} weights of a row share a scale, and {name} has {width} weights a row; "
            "use model.quantization=int8"
        )
    for block in blocks:
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear):
                parent, _, child = name.rpartition(".")
                if device is not None:
                    layer.to(device)
                new = (
                    Int8Linear.of(layer)
                    if size is None or quantization == "int8"
                    else NF4Linear.of(layer, size)
                )
                setattr(block.get_submodule(parent), child, new)


def weight_sizes(module: nn.Module) -> list[int]:
    """How many numbers each parameter and buffer has; for codes and scales, the weight that they stand for."""
    sizes = []
    for part in module.modules():
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if isinstance(part, QuantizedLinear):
            sizes.append(part.in_features * part.out_features)
            tensors = [] if part.bias is None else [part.bias]
        sizes += [tensor.numel() for tensor in tensors]
    return sizes


def whole_copy(transformer: nn.Module) -> nn.Module:
    """Copy a transformer to host memory, with plain layers of the dequantized weights in place of quantized ones."""
    # By nn.Module's own `to`: that of diffusers warns whenever it is given a dtype.
    copied = nn.Module.to(copy.deepcopy(transformer), "cpu")
    for name, layer in list(copied.named_modules()):
        if isinstance(layer, QuantizedLinear):
            parent, _, child = name.rpartition(".")
            setattr(copied.get_submodule(parent), child, layer.whole())
    return copied
