"""Autocast on the fake device: which operations compute in which dtype, and what copies of weights take."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from flowcorr.config.schema import LoraConfig
from flowcorr.plan.devices import GPUS, Utilisation
from flowcorr.plan.fake_backend import DEVICE
from flowcorr.plan.fake_device import FakeDevice
from flowcorr.plan.operations import busy_seconds
from flowcorr.plan.pipelines import find_architecture
from flowcorr.plan.training import (
    actor_batch,
    load_actor,
    measure_blocks,
    measure_scoring,
    measure_training,
    recompute_log_probs,
)

# The fake device has to be registered before a process computes its first gradient.
pytestmark = pytest.mark.fake_device

WIDTH = 512
COPY = 2 * WIDTH**2  # bytes of a layer's weights in bfloat16


def autocast():
    return torch.autocast(DEVICE, torch.bfloat16)


def layer_of(*, trained=True):
    return nn.Linear(WIDTH, WIDTH, bias=False, device=DEVICE).requires_grad_(trained)


def test_operations_compute_in_the_dtypes_of_cuda(new_device):
    with new_device():
        layer, low = layer_of(), torch.ones(8, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        high, heads = low.float(), torch.ones(1, 2, 8, 64, device=DEVICE)
        with autocast():
            lowered = (
                layer(high),
                high @ high.T,
                functional.scaled_dot_product_attention(heads, heads, heads),
            )
            raised = (
                functional.layer_norm(low, (WIDTH,)),
                functional.rms_norm(low, (WIDTH,)),
                low.softmax(-1),
                low.sum(),
                low.pow(2),
            )
            same = (low + 1, functional.gelu(low), low.sum(dtype=torch.bfloat16))
        assert {value.dtype for value in (*lowered, *same)} == {torch.bfloat16}
        assert {value.dtype for value in raised} == {torch.float32}
        assert layer(high).dtype == (high @ high.T).dtype == torch.float32  # autocast is over


def test_a_trained_weight_is_copied_once_until_autocast_ends(new_device):
    with new_device() as device, torch.no_grad():
        layer, inputs = layer_of(), torch.ones(1, WIDTH, device=DEVICE)
        before = device.allocated
        with autocast():
            layer(inputs)
            assert (device.allocated - before, device.copies) == (COPY, COPY)
            with device.section() as again:
                layer(inputs)
            assert again.peak - again.before < COPY
        assert (device.allocated, device.copies) == (before, 0)


def test_a_frozen_weight_is_copied_for_each_use(new_device):
    with new_device() as device:
        layer, inputs = layer_of(trained=False), torch.ones(1, WIDTH, device=DEVICE)
        with torch.no_grad(), autocast():
            layer(inputs)
            assert device.copies == 0
        inputs.requires_grad_()
        with autocast():
            outputs = layer(inputs) + layer(inputs)
        assert device.copies == 2 * COPY  # for the backward pass
        outputs.sum().backward()
        assert device.copies == 0
        assert inputs.grad.dtype == torch.float32


def test_gradients_have_the_dtype_of_their_weights(new_device):
    with new_device() as device:
        layer = layer_of()
        with device.section() as section:
            with autocast():
                outputs = layer(torch.ones(8, WIDTH, device=DEVICE))
            outputs.sum().backward()
        assert layer.weight.grad.dtype == torch.float32
    assert section.promotions == {}


def test_products_take_the_time_of_bfloat16():
    gpu = replace(GPUS["h100-80gb"], bandwidth=1e30)
    with FakeDevice() as device:
        layer, inputs = layer_of(), torch.ones(8, WIDTH, device=DEVICE)
        with device.section() as section, autocast():
            layer(inputs)
    assert section.flops == 2 * 8 * WIDTH**2
    busy = busy_seconds(section.operations, gpu, Utilisation())
    assert busy == pytest.approx(section.flops / (gpu.bf16 * Utilisation().matmul))


def full_fine_tuning(make_config, **actor):
    return make_config(
        actor={"micro_batch_size": 4, "mini_batches": 1, **actor},
        rollout={"prompts_per_step": 2, "n": 4},
        model={"path": "tiny_ocr", "lora": LoraConfig(rank=0)},
    )


def test_scoring_copies_the_weights_of_all_matrix_products(make_config, new_device):
    config, architecture = full_fine_tuning(make_config, autocast=True), find_architecture("tiny_ocr")
    with new_device() as device:
        family, actor = load_actor(config, architecture, device)
        batch = actor_batch(config, architecture, family, 4)
        with autocast():  # keeps the copies when the actor's own autocast ends
            recompute_log_probs(actor, batch)
            copied = device.copies
        assert device.copies == 0
    layers = [part for part in family.transformer.modules() if isinstance(part, nn.Linear | nn.Conv2d)]
    sizes = [2 * weight.numel() for layer in layers for weight in layer.parameters()]
    assert copied == sum(-(-size // 512) * 512 for size in sizes)  # in multiples of 512 bytes


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_computes_as_much_with_fewer_activations(make_config, new_device, checkpointing):
    architecture = find_architecture("tiny_ocr")
    low, high = (
        measure_blocks(
            full_fine_tuning(make_config, autocast=on, gradient_checkpointing=checkpointing),
            architecture,
        )
        for on in (True, False)
    )
    assert (low.gradients, low.moments, low.backward.flops) == (
        high.gradients,
        high.moments,
        high.backward.flops,
    )
    assert high.backward.copied == 0 < low.backward.copied < high.transformer / 2
    activations = [part.backward.peak - part.gradients - part.backward.copied for part in (low, high)]
    assert activations[0] < 0.9 * activations[1]


def test_few_blocks_tell_the_copies_of_all(make_config, new_device):
    """The copies add up over the depth, so with more blocks the peak moves from the backward to the forward pass."""
    config = full_fine_tuning(make_config, autocast=True, gradient_checkpointing=True)
    architecture = find_architecture("tiny_ocr").with_depths({"num_layers": 6})
    extrapolated = measure_training(config, architecture)
    whole = measure_blocks(config, architecture)
    assert extrapolated.backward.peak == pytest.approx(whole.backward.peak, rel=1e-3)
    assert extrapolated.backward.copied == pytest.approx(whole.backward.copied, rel=1e-3)
    scored = measure_scoring(config, architecture)
    assert scored.work.peak == pytest.approx(whole.recompute.peak, rel=1e-3)
