import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError, MissingExtraError
from flowcorr.models import load_family
from flowcorr.models.base import repeated_blocks
from flowcorr.models.quantized import Int8Linear, NF4Linear, QuantizedLinear, quantize_blocks, whole_copy
from tests.shallow import SHALLOW

INT8 = pytest.param("int8", id="int8")
NF4 = pytest.param("nf4", id="nf4", marks=pytest.mark.quantized)
BOTH = pytest.mark.parametrize("quantization", [INT8, NF4])
# The 16 values of arXiv:2305.14314, appendix E.
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def linear(width=96, rows=8, *, dtype=torch.float32, bias=True):
    draw = torch.Generator().manual_seed(width)
    layer = nn.Linear(width, rows, bias, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(torch.randn(rows, width, generator=draw))
    return layer


def quantized(layer, quantization, block=32):
    return Int8Linear.of(layer) if quantization == "int8" else NF4Linear.of(layer, block)


def inputs(width=96, dtype=torch.float32):
    return torch.randn(5, width, generator=torch.Generator().manual_seed(1)).to(dtype)


class Blocks(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.embedder = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 3)) for width in widths)
        self.proj_out = nn.Linear(7, 7)


@pytest.mark.quantized
@pytest.mark.parametrize(("width", "block"), [(96, 32), (160, 32), (128, 64), (192, 64)])
def test_nf4_codes_read_by_hand_are_the_dequantized_weight(width, block):
    """The kernel of bitsandbytes for CPUs takes wrong scales where a row is no multiple of the block."""
    layer = linear(width)
    codes = NF4Linear.of(layer, block)
    assert codes.weight.shape == (8, width // 2)
    assert codes.scales.shape == (8, width // block)
    pairs = torch.stack([codes.weight >> 4, codes.weight & 15], -1).flatten(1).long()
    by_hand = torch.tensor(NF4_VALUES)[pairs] * codes.scales.repeat_interleave(block, 1)
    torch.testing.assert_close(codes.dequantized(torch.float32), by_hand)
    blocks = layer.weight.unflatten(1, (-1, block))
    torch.testing.assert_close(codes.scales, blocks.abs().amax(-1))
    nearest = (blocks / codes.scales[..., None])[..., None].sub(torch.tensor(NF4_VALUES)).abs().argmin(-1)
    assert (nearest.flatten(1) == pairs).double().mean() > 0.999


def test_int8_rounds_to_the_nearest_of_255_values_of_a_row():
    layer = linear()
    codes = Int8Linear.of(layer)
    assert codes.weight.dtype == torch.int8
    assert (codes.weight.abs().amax(1) == 127).all()
    error = (codes.dequantized(torch.float32) - layer.weight).abs()
    assert (error <= codes.scales * 0.5001).all()
    assert error.max() > 0


def test_a_row_of_zeros_stays_zero():
    layer = linear()
    layer.weight[0] = 0
    assert not Int8Linear.of(layer).dequantized(torch.float32)[0].any()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradient_are_those_of_the_dequantized_weights(quantization, dtype, bias):
    layer = quantized(linear(dtype=dtype, bias=bias), quantization)
    found, expected = (inputs(dtype=dtype).requires_grad_() for _ in range(2))
    out, plain = layer(found), layer.whole()(expected)
    assert out.dtype == plain.dtype == dtype
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    torch.testing.assert_close(out, plain, **close)
    out.square().sum().backward()
    plain.square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=close["rtol"], atol=20 * close["atol"])


@BOTH
def test_under_autocast_a_layer_returns_the_dtype_of_a_plain_one(quantization):
    layer = quantized(linear(), quantization)
    rows = inputs().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, plain = layer(rows), layer.whole()(rows)
    assert out.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(out, plain, rtol=0.02, atol=0.1)
    out.sum().backward()
    assert rows.grad.dtype == torch.float32


@BOTH
def test_no_graph_holds_a_dequantized_weight(quantization):
    layer = quantized(linear(), quantization)
    held = []

    def note(tensor):
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(inputs().requires_grad_()).sum()
    assert {tensor.data_ptr() for tensor in held} == {layer.weight.data_ptr(), layer.scales.data_ptr()}


@BOTH
def test_a_layer_loads_its_own_state(quantization):
    one, other = (quantized(linear(rows=8), quantization) for _ in range(2))
    other.weight.zero_()
    other.scales.zero_()
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(inputs()), other(inputs()))


@BOTH
def test_another_dtype_leaves_codes_and_scales_as_they_are(quantization):
    layer = quantized(linear(), quantization)
    other = copy.deepcopy(layer).to(torch.bfloat16)
    assert torch.equal(other.weight, layer.weight)
    assert torch.equal(other.scales, layer.scales)
    assert other.bias.dtype == other(inputs(dtype=torch.bfloat16)).dtype == torch.bfloat16


@BOTH
def test_only_linear_layers_of_the_blocks_are_replaced(quantization):
    family, plain = (
        load_family(ModelConfig(path=SHALLOW, quantization=kind), text_encoders=False)
        for kind in (quantization, "none")
    )
    kind = {"int8": Int8Linear, "nf4": NF4Linear}[quantization]
    replaced = {name for name, module in family.transformer.named_modules() if isinstance(module, kind)}
    linear_layers = {
        name for name, module in plain.transformer.named_modules() if isinstance(module, nn.Linear)
    }
    assert replaced == {name for name in linear_layers if name.startswith("transformer_blocks.")}
    assert {"proj_out", "norm_out.linear", "context_embedder"} <= linear_layers - replaced
    assert not any(parameter.requires_grad for parameter in family.transformer.parameters())


@BOTH
def test_scoring_mode_does_not_change_the_result(quantization):
    """bitsandbytes' own layer packs its weight in `eval()`, and is 3e-3 off from then on."""
    layer, rows = quantized(linear(128, 128), quantization), inputs(128)
    expected = layer.train()(rows)
    with torch.no_grad():
        assert torch.equal(layer.eval()(rows), expected)
    assert torch.equal(layer(rows.clone().requires_grad_()), expected)


@BOTH
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_layer_is_one_graph_and_computes_the_same(quantization):
    """Without a code generator, which would take a minute; `tests/actor` has the whole transformer."""
    layer = quantized(linear(), quantization)
    compiled = copy.deepcopy(layer)
    compiled.compile(fullgraph=True, backend="aot_eager")
    found, expected = (inputs().requires_grad_() for _ in range(2))
    out, plain = compiled(found), layer(expected)
    torch.testing.assert_close(out, plain)
    out.square().sum().backward()
    plain.square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.quantized
def test_nf4_takes_blocks_of_64_where_every_width_divides_else_of_32():
    for widths, block in (((64, 128), 64), ((64, 96), 32), ((32,), 32)):
        transformer = Blocks(*widths)
        quantize_blocks(transformer, "nf4", "cpu")
        layers = [block[0] for block in repeated_blocks(transformer)]
        assert [layer.scales.shape[1] * block for layer in layers] == list(widths)
        assert type(transformer.embedder) is type(transformer.proj_out) is nn.Linear


def test_a_width_that_fits_no_block_is_refused():
    with pytest.raises(ConfigError, match=r"^model\.quantization=nf4: 32 .* 80 .*model\.quantization=int8$"):
        quantize_blocks(Blocks(64, 80), "nf4", "cpu")
    transformer = Blocks(64, 80)
    quantize_blocks(transformer, "int8", "cpu")
    assert type(transformer.blocks[1][0]) is Int8Linear


def test_a_transformer_without_blocks_is_refused():
    with pytest.raises(ConfigError, match=r"^model\.quantization=int8 .*blocks; Sequential "):
        quantize_blocks(nn.Sequential(nn.Linear(4, 4)), "int8", "cpu")


def test_without_bitsandbytes_it_says_how_to_install_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        MissingExtraError, match=r"quantization=nf4 .*bitsandbytes; .*'flowcorr\[quantized\]'"
    ):
        load_family(ModelConfig(path=SHALLOW, quantization="nf4"), text_encoders=False)


def test_layers_go_to_the_device_one_by_one(monkeypatch):
    """A whole model does not fit there: each layer's weight leaves before the next one comes."""
    transformer, moved = Blocks(64, 96, 64), []
    to = nn.Linear.to

    def counted(layer, device):
        others = [block[0] for block in transformer.blocks if block[0] is not layer]
        moved.append(sum(type(other) is Int8Linear for other in others))
        return to(layer, device)

    monkeypatch.setattr(nn.Linear, "to", counted)
    quantize_blocks(transformer, "int8", "cpu")
    assert moved == [0, 1, 2]


@BOTH
def test_a_whole_copy_has_the_dequantized_weights(quantization):
    model = ModelConfig(path=SHALLOW, quantization=quantization, dtype="bfloat16")
    transformer = load_family(model, text_encoders=False).transformer
    whole = whole_copy(transformer)
    plain = load_family(replace(model, quantization="none"), text_encoders=False).transformer
    assert not any(isinstance(module, QuantizedLinear) for module in whole.modules())
    assert {name: (value.shape, value.dtype) for name, value in whole.state_dict().items()} == {
        name: (value.shape, value.dtype) for name, value in plain.state_dict().items()
    }
    name = "transformer_blocks.0.attn.to_q"
    expected = transformer.get_submodule(name).dequantized(torch.bfloat16)
    assert torch.equal(whole.get_submodule(name).weight, expected)
    off = (expected - plain.get_submodule(name).weight).float().norm() / expected.float().norm()
    assert off < {"int8": 0.012, "nf4": 0.1}[quantization]
