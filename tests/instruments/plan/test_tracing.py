"""What a tracer counts of small programs."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flowcorr.instruments.plan.tracing import Tracer

WIDTH, ROWS = 64, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(functional.gelu(self.up(hidden)))


class Stack(nn.Module):
    def __init__(self, depth, checkpointing):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.checkpointing = checkpointing

    def forward(self, hidden):
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointing else block(hidden)
        return self.head(hidden)


def counts(depth, checkpointing, *, repeated=None, autocast=False):
    """Work of a pass without gradients, and of a training step."""
    with torch.device("meta"):
        stack = Stack(depth, checkpointing)
    with Tracer() as tracer:
        tracer.place(stack, torch.float32)
        if repeated:
            tracer.repeat(list(stack.blocks), repeated)
        inputs = torch.ones(ROWS, WIDTH)
        lower = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with lower, torch.no_grad(), tracer.section() as scored:
            stack(inputs)
        with tracer.leaving_out_gradients(list(stack.parameters())), tracer.section() as trained:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = stack(inputs).sum()
            loss.backward()
        assert tracer.allocated >= 0
    return scored.work, trained.work


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_three_blocks_count_as_all_of_them(checkpointing, autocast):
    whole = counts(9, checkpointing, autocast=autocast)
    few = counts(3, checkpointing, repeated=9, autocast=autocast)
    for work, expected in zip(few, whole, strict=True):
        for name in ("flops", "moved", "kernels"):
            assert getattr(work, name) == pytest.approx(getattr(expected, name), rel=0.01), name
        assert work.peak == pytest.approx(expected.peak, rel=0.06 if autocast else 0.02)


def test_memory_is_that_of_live_tensors():
    with Tracer() as tracer, tracer.section() as section:
        kept = torch.empty(1000)
        del kept
        other = torch.empty(100)
        assert tracer.allocated == 512
        view = other.view(10, 10)
    assert view.shape == (10, 10)
    assert section.work.peak == 4096


def test_arithmetic_is_that_of_matrix_products_and_attention():
    with Tracer() as tracer, tracer.section() as section:
        torch.ones(3, 4) @ torch.ones(4, 5)
    assert section.flops == 2 * 3 * 4 * 5
    with Tracer() as tracer:
        query = torch.ones(1, 2, 1024, 64, dtype=torch.bfloat16)
        mask = torch.ones(1, 1, 1, 1024, dtype=torch.bool)
        with tracer.section() as section:
            functional.scaled_dot_product_attention(query, query, query, mask)
    assert section.flops == 2 * 2 * 2 * 1024 * 1024 * 64
    assert section.work.peak < 2 * 1024 * 1024  # it stores no scores


def test_checks_of_values_hold_and_masks_select_everything():
    with Tracer():
        values = torch.ones(8)
        assert bool((values > 0).all())
        assert not bool(values.isnan().any())
        assert values.sum().item() == 1.0
        mask = values > 0
        assert len(values[mask]) == len(mask.nonzero()) == 8
        assert len((~mask).nonzero()) == 0
        assert len(values.unique()) == 1


def test_a_parameter_in_two_places_stays_one():
    with torch.device("meta"):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    with Tracer() as tracer:
        tracer.place(nn.ModuleList([first, second]), torch.bfloat16)
        assert first.weight is second.weight
        assert tracer.allocated == 3 * 512
