import peft
import pytest
import torch
from torch import nn

from flowcorr.models.lora_linear import LoraLinear

RANK, ALPHA = 2, 3.0


@pytest.fixture
def layer():
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, init_lora_weights=False)
    layer = LoraLinear(nn.Linear(5, 4), "default", config=config, r=RANK, lora_alpha=ALPHA).double()
    layer.base_layer.requires_grad_(False)
    return layer


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (2, 1, 3, 5)])
def test_it_multiplies_as_its_merged_weight(layer, shape):
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    inputs = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    merged = nn.functional.linear(
        inputs, layer.base_layer.weight + ALPHA / RANK * up @ down, layer.base_layer.bias
    )
    outputs, direction = layer(inputs), torch.randn(*shape[:-1], 4, dtype=torch.float64)
    torch.testing.assert_close(outputs, merged)
    wanted = torch.autograd.grad((merged * direction).sum(), [inputs, down, up])
    torch.testing.assert_close(torch.autograd.grad((outputs * direction).sum(), [inputs, down, up]), wanted)


def test_without_its_adapter_it_is_the_base(layer):
    inputs = torch.randn(2, 5, dtype=torch.float64)
    layer.enable_adapters(False)
    assert torch.equal(layer(inputs), layer.base_layer(inputs))
    layer.enable_adapters(True)
    assert not torch.equal(layer(inputs), layer.base_layer(inputs))
