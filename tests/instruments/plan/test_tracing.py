"""What a tracer counts of small programs on torch's `meta` device."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flowcorr.errors import BackendError
from flowcorr.instruments.plan.tracing import tracing

WIDTH, ROWS = 64, 32


@pytest.fixture(autouse=True)
def on_meta():
    with torch.device("meta"):
        yield


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


def counts(depth, checkpointing, *, repeated=None):
    """Work of a pass without gradients, and of a training step."""
    stack, inputs = Stack(depth, checkpointing), torch.ones(ROWS, WIDTH)
    for parameter in stack.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with tracing([(list(stack.blocks), repeated or depth)]) as tracer:
        with torch.no_grad(), tracer.section() as scored:
            stack(inputs)
        with tracer.section() as trained:
            tracer.backward(stack(inputs).sum())
    assert tracer.allocated == 0
    return scored.work, trained.work


@pytest.mark.parametrize("checkpointing", [False, True])
def test_three_blocks_count_as_all_of_them(checkpointing):
    whole = counts(9, checkpointing)
    few = counts(3, checkpointing, repeated=9)
    for work, expected in zip(few, whole, strict=True):
        for name in ("flops", "moved", "kernels"):
            assert getattr(work, name) == pytest.approx(getattr(expected, name), rel=0.01), name
        assert work.peak == pytest.approx(expected.peak, rel=0.02)


def test_checkpointing_computes_blocks_again_and_holds_their_inputs():
    (_, plain), (_, checkpointed) = counts(9, False), counts(9, True)
    # Of the two products of a block the first one, on which gradients depend.
    assert checkpointed.flops / plain.flops == pytest.approx(7 / 6, rel=0.02)
    assert checkpointed.peak < plain.peak / 2


def test_memory_is_that_of_live_tensors():
    with tracing() as tracer, tracer.section() as section:
        kept = torch.empty(1000)
        del kept
        other = torch.empty(100)
        assert tracer.allocated == 512
        view = other.view(10, 10)
        view.add_(1)
        assert tracer.allocated == 512
    assert section.work.peak == 4096
    assert section.work.moved == 2 * 400
    assert section.work.kernels == 1


def test_attention_stores_no_scores():
    query = torch.ones(1, 2, 1024, 64, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, 1024, dtype=torch.bool)
    plain = functional.scaled_dot_product_attention
    with tracing() as tracer, tracer.section() as section:
        functional.scaled_dot_product_attention(query, query, query, mask)
    assert section.work.flops == 2 * 2 * 2 * 1024 * 1024 * 64
    assert section.work.peak < 2 * 1024 * 1024
    assert functional.scaled_dot_product_attention is plain


def test_grouped_queries_attend_like_others():
    query, key = torch.ones(1, 4, 16, 8), torch.ones(1, 2, 16, 8)
    with tracing() as tracer, tracer.section() as section:
        made = functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    assert made.shape == query.shape
    assert section.work.flops == 2 * 2 * 4 * 16 * 16 * 8


def test_masks_select_everything_and_numbers_that_are_read_are_one():
    with tracing():
        values = torch.ones(8)
        assert bool((values > 0).all())
        assert values.sum().item() == 1.0
        mask = values > 0
        assert len(values[mask]) == len(mask.nonzero()) == 8
        assert torch.ones(3, 8, 2)[:, mask].shape == (3, 8, 2)


def test_an_operation_that_depends_on_values_is_named():
    with tracing(), pytest.raises(BackendError, match=r"torch\.masked_select: "):
        torch.ones(8).masked_select(torch.ones(8) > 0)


def test_what_known_numbers_give_is_computed_and_not_counted():
    with tracing() as tracer, tracer.section() as section:
        known = torch.tensor([2.0, 3.0], device="cpu")
        assert (known * known).tolist() == [4.0, 9.0]
        moved = known.to("meta") * torch.ones(2)
    assert moved.is_meta
    assert section.work.kernels == 3  # the copy, `ones` and the product
