"""Attention by the operator that `model.attention` amounts to."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from flowcorr.errors import ConfigError
from flowcorr.plan.attention import operator_of
from flowcorr.plan.devices import GPUS, Utilisation
from flowcorr.plan.fake_backend import DEVICE
from flowcorr.plan.operations import busy_seconds
from flowcorr.plan.pipelines import find_architecture
from flowcorr.plan.training import load_actor, one_optimizer_step

# The fake device has to be registered before a process computes its first gradient.
pytestmark = pytest.mark.fake_device

TOKENS, HEADS = 1024, 2


def masked(device, operator):
    """What attention with a mask needs, forwards and backwards."""
    device.attention = operator
    with device:
        query = torch.ones(1, HEADS, TOKENS, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        mask = torch.ones(1, 1, 1, TOKENS, dtype=torch.bool, device=DEVICE)
        with device.section() as section:
            functional.scaled_dot_product_attention(query, query, query, mask).sum().backward()
    return section


def test_a_mask_costs_time_by_torchs_choice_and_none_by_a_kernel_for_masks(new_device):
    sections = {name: masked(new_device(), name) for name in ("torch", "efficient", "flash")}
    gpu, utilisation = GPUS["h100-80gb"], Utilisation()
    seconds = {name: busy_seconds(section.operations, gpu, utilisation) for name, section in sections.items()}
    assert seconds["torch"] == seconds["efficient"] > 1.5 * seconds["flash"]


def test_matrix_products_store_the_scores(new_device):
    fused, stored = (masked(new_device(), name) for name in ("efficient", "math"))
    scores = 2 * HEADS * TOKENS**2
    assert fused.peak - fused.before < scores < stored.peak - stored.before


@pytest.mark.parametrize(
    ("backend", "operator"),
    [
        (None, "torch"),
        ("native", "torch"),
        ("_native_math", "math"),
        ("xformers", "efficient"),
        ("flash_varlen", "flash"),
        ("_native_cudnn", "flash"),
    ],
)
def test_backends_of_diffusers_amount_to_operators(backend, operator):
    assert operator_of(backend) == operator


def test_a_backend_that_is_unknown_or_has_no_effect_is_refused(make_config, new_device):
    with pytest.raises(ConfigError, match=r"model\.attention='flash_varlem' is unknown.*flash_varlen"):
        operator_of("flash_varlem")
    config = one_optimizer_step(make_config())
    config = replace(config, model=replace(config.model, attention="_native_math"))
    with new_device() as device, pytest.raises(ConfigError, match="would have no effect: SD3Transformer"):
        load_actor(config, find_architecture("tiny_ocr"), device)
