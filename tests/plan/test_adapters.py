import pytest
import torch

from flowcorr import lora
from flowcorr.config import ModelConfig
from flowcorr.config.schema import LoraConfig
from flowcorr.models import load_family
from flowcorr.plan.adapters import with_wrapped_adapter, without_adapter


@pytest.fixture(scope="module")
def transformer():
    family = load_family(ModelConfig(path="tiny_ocr"))
    lora.add_adapter(family.transformer, family, LoraConfig(rank=4, alpha=4.0), seed=0)
    for name, parameter in family.transformer.named_parameters():
        if ".lora_B" in name:
            parameter.data.fill_(0.1)
    return family.transformer


@pytest.fixture
def layer(transformer):
    return transformer.transformer_blocks[0].attn.to_q


def test_an_engines_layer_computes_what_the_trainers_does(transformer, layer):
    inputs = torch.randn(3, layer.in_features)
    own = layer(inputs)
    with with_wrapped_adapter(transformer):
        assert layer.forward.func.__module__ == "flowcorr.plan.adapters"
        torch.testing.assert_close(layer(inputs), own, rtol=1e-4, atol=1e-5)
    assert type(layer).forward == layer.forward.__func__


def test_without_adapter_the_base_is_left(transformer, layer):
    inputs = torch.randn(3, layer.in_features)
    with without_adapter(transformer):
        assert torch.equal(layer(inputs), layer.base_layer(inputs))
    assert not torch.equal(layer(inputs), layer.base_layer(inputs))
