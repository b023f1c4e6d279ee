"""Every recipe's step on fake device tensors, at the real width and a depth of 2; and what the fake device finds."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flowcorr.config import load, recipe_names
from flowcorr.plan.fake_backend import DEVICE
from flowcorr.plan.pipelines import find_architecture
from flowcorr.plan.training import (
    actor_batch,
    correct,
    load_actor,
    one_optimizer_step,
    recompute_log_probs,
    update,
)

# The fake device has to be registered before a process computes its first gradient.
pytestmark = pytest.mark.fake_device

SLOW = {"tiny_jpeg_lora", "qwen_image_ocr_lora_decoupled", "qwen_image_ocr_lora_rollout_corr"}
BOUNDS = {  # GB beside weights and batch, by the first part of the recipe's name: recompute, and the first update
    "tiny": (0.02, 0.065),
    "sd35": (0.96, 2.8),
    "qwen": (3.3, 6.0),
    "flux": (1.7, 2.95),
    "flux2": (2.9, 3.15),
    "z": (1.95, 4.95),
}
PROMOTING = {  # float32 adapters and norms among bfloat16 activations, and their gradients
    "peft/tuners/lora/layer.py:forward",
    "diffusers/models/normalization.py:forward",
    "diffusers/models/embeddings.py:get_1d_rotary_pos_embed",
    "diffusers/models/transformers/transformer_flux.py:__call__",
    "diffusers/models/transformers/transformer_flux2.py:__call__",
    "backward pass",
}


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in recipe_names()]
)
def test_a_recipes_step_keeps_to_the_device_and_to_its_bounds(recipe, new_device):
    config = one_optimizer_step(load(recipe, ["rollout.name=in_process", "rollout.engine={}"]))
    architecture = find_architecture(config.model.path)
    depths = {kind: min(depth, 2) for kind, depth in architecture.depths.items()}
    size = config.actor.micro_batch_size
    with new_device() as device:
        family, actor = load_actor(config, architecture.with_depths(depths), device)
        batch = actor_batch(config, architecture, family, 2 * size)
        micro_batch = batch.select(slice(0, size))
        with device.section() as recompute:
            recompute_log_probs(actor, micro_batch)
        with device.section() as corrected:
            batch = correct(actor, batch)
        micro_batch = batch.select(slice(0, size))
        with device.section() as first:
            update(actor, micro_batch)
        with device.section() as second:
            update(actor, batch)
    assert host_reads(recompute) == host_reads(corrected) == Counter()
    assert [place for place in recompute.uploads if place.startswith("flowcorr/")] == []
    # The norm, kept terms, dealing mini-batches, samples of advantage 0, and whether each pass is finite.
    assert host_reads(first).total() <= 9, first.host_reads
    one_more = host_reads(second).total() - host_reads(first).total()
    passes = 1 if config.actor.fold_steps else config.sampling.sde_window_size
    assert one_more <= passes, second.host_reads  # of a further micro-batch: whether all log-probs are finite
    for section in (recompute, first):
        large = {place for (_, place), size in section.promotions.items() if size > 1e6}
        assert large <= PROMOTING
    for section, bound in zip((recompute, first), BOUNDS[recipe.partition("_")[0]], strict=True):
        assert (section.peak - section.before) / 1e9 < bound


def host_reads(section):
    """What the host waited for, but for the masks by which Z-Image cuts out captions."""
    reads = section.host_reads.items()
    return Counter({(kind, place): count for (kind, place), count in reads if "z_image.py" not in place})


def test_reads_by_the_host_are_counted_where_they_happen(new_device):
    with new_device() as device, device.section() as section:
        values = torch.ones(8, device=DEVICE)
        assert values.sum().item() == 1.0
        assert bool((values > 0).all())
        assert len(values[values > 0]) == len((values > 0).nonzero()) == 8
        values.cpu()
        torch.tensor([1.0, 2.0], device=DEVICE)
        torch.zeros(3).to(DEVICE)
        values.copy_(torch.zeros(8))
        torch.where(values > 0, values, 0.0).clamp(max=2.0)
    kinds = Counter(kind for kind, _ in section.host_reads.elements())
    assert kinds == {"item": 2, "mask": 1, "nonzero": 1, "copy": 1}
    assert section.uploads.total() == 3
    assert all(
        place.endswith("test_reads_by_the_host_are_counted_where_they_happen")
        for _, place in section.host_reads
    )


def test_a_silent_promotion_is_counted_and_a_conversion_is_not(new_device):
    with new_device() as device:
        low, high = torch.ones(1000, dtype=torch.bfloat16, device=DEVICE), torch.ones(1000, device=DEVICE)
        with device.section() as section:
            low.float() + high
            low * 2.0
        assert section.promotions == {}
        with device.section() as section:
            low + high
    assert list(section.promotions.values()) == [4000]


def test_memory_is_that_of_live_tensors(new_device):
    with new_device() as device, device.section() as section:
        kept = torch.empty(1000, device=DEVICE)
        view = kept[:10].view(2, 5)
        dropped = torch.empty(100_000, device=DEVICE)
        del dropped
        assert device.allocated == 4096  # 4000 bytes in multiples of 512
        del kept
        assert device.allocated == 4096
        del view
        assert device.allocated == 0
    assert section.peak == 4096 + 400_384


def test_flops_are_those_of_the_matrix_products(new_device):
    with new_device() as device:
        layer = nn.Linear(64, 32, device=DEVICE)
        inputs = torch.ones(8, 64, device=DEVICE, requires_grad=True)
        with device.section() as section:
            layer(inputs).sum().backward()
    product = 2 * 8 * 64 * 32
    assert section.flops == 3 * product  # forwards, and the gradients of weights and inputs


def test_a_product_in_place_has_its_flops(new_device):
    with new_device() as device:
        outputs, left, right = (torch.ones(*shape, device=DEVICE) for shape in ((8, 32), (8, 64), (64, 32)))
        with device.section() as section:
            outputs.addmm_(left, right)
    assert section.flops == 2 * 8 * 64 * 32
    assert section.moved == 4 * (2 * 8 * 32 + 8 * 64 + 64 * 32)


def test_activation_checkpointing_keeps_inputs_and_computes_twice(new_device):
    def use(checkpointed):
        with new_device() as device:
            layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
            values = torch.ones(512, 64, device=DEVICE)
            for layer in layers:
                device.place(layer)
            with device.section() as section:
                for layer in layers:
                    values = checkpoint(layer, values, use_reentrant=False) if checkpointed else layer(values)
                values.sum().backward()
        return section

    kept, recomputed = use(False), use(True)
    assert recomputed.peak < 0.7 * kept.peak
    assert 1.1 * kept.flops < recomputed.flops < 1.5 * kept.flops


@pytest.mark.parametrize("masked", [False, True])
def test_attention_keeps_no_matrix_of_scores(new_device, masked):
    with new_device() as device:
        query = torch.ones(1, 2, 4096, 64, dtype=torch.bfloat16, device=DEVICE)
        mask = torch.ones(1, 1, 1, 4096, dtype=torch.bool, device=DEVICE) if masked else None
        with device.section() as section:
            functional.scaled_dot_product_attention(query, query, query, mask)
    assert section.peak - section.before < 2 * query.nbytes < 2 * 4096**2
    assert section.flops == 4 * 2 * 4096**2 * 64
