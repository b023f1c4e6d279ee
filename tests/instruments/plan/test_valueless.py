"""Tensors without values have the layouts, and share the memory, of those with values."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from flowcorr.instruments.plan.tracing import Tracer
from flowcorr.instruments.plan.valueless import Valueless, storage


def in_place(x):
    x.add_(1).mul_(x)
    x[0].zero_()
    x[1:].copy_(x[:1])
    return x


def squeezed_in_place(x):
    y = x.unsqueeze(0).clone()
    y.squeeze_(0)
    return y


def to_a_result(x):
    result = torch.empty(1)
    return torch.sort(x, out=(torch.empty_like(x), torch.empty(x.shape, dtype=torch.long)))[1], result


def many_at_once(x):
    parts = [x.clone(), x.t().clone()]
    torch._foreach_mul_(parts, 2.0)
    torch._foreach_lerp_(parts, [parts[0] + 1, parts[1] + 1], 0.5)
    return [*parts, *torch._foreach_norm(parts)]


def attention(x):
    heads = x.view(2, 2, 3, 2).to(torch.bfloat16)
    return functional.scaled_dot_product_attention(heads, heads, heads)


def gradients(x):
    layer = nn.Linear(6, 3).double()
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(x)
    loss = functional.layer_norm(layer(x), (3,)).square().sum()
    loss.backward()
    return [parameter.grad for parameter in layer.parameters()]


def under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        product = x @ x.t()
        return product, product.softmax(-1), functional.linear(x, x)


PROGRAMS = {
    "views": lambda x: [x.t(), x[1:, ::2], x.view(6, 4), x.expand(3, 4, 6), *x.split(3, dim=1), *x.unbind()],
    "copies": lambda x: [x.t().contiguous(), x.t().reshape(24), x.to(torch.float64), x.clone(), x.bfloat16()],
    "promotion": lambda x: [
        x + 1,
        x.long() + 1,
        x.long() + 1.5,
        x.bool() + 1,
        x + x.double(),
        x.half() * 2.0,
    ],
    "reductions": lambda x: [x.mean(), x.sum(0, keepdim=True), x.max(dim=1)[1], x.std(), x.isnan().any()],
    "quantiles": lambda x: [x.median(), x.nanquantile(0.5), x.quantile(torch.tensor([0.1, 0.9]), dim=1)],
    "random": lambda x: [
        torch.randn(2, 3, generator=torch.Generator().manual_seed(0)),
        torch.randperm(5, generator=torch.Generator().manual_seed(0)),
        torch.rand_like(x.t()),
    ],
    "images": lambda x: functional.conv2d(x.view(1, 2, 3, 4), x.new_ones(2, 2, 3, 3), padding=1),
    "by index": lambda x: [
        x[torch.tensor([1, 0])],
        x.gather(1, torch.zeros(4, 2, dtype=torch.long)),
        x[None, 1],
    ],
    "in place": in_place,
    "squeezed in place": squeezed_in_place,
    "to a result": to_a_result,
    "many at once": many_at_once,
    "attention": attention,
    "gradients": gradients,
    "under autocast": under_autocast,
}


def results(program):
    """The program's tensors twice: what it made the second time was seen before."""
    found = []
    for _ in range(2):
        made = program(torch.ones(4, 6))
        found += made if isinstance(made, (list, tuple)) else [made]
    return found


def sharing(tensors):
    """Which tensors share memory: for each one, the first that has its."""
    places = [storage(tensor)._cdata for tensor in tensors]
    return [places.index(place) for place in places]


@pytest.mark.parametrize("name", PROGRAMS)
def test_layouts_and_memory_are_those_of_tensors_with_values(name):
    expected = results(PROGRAMS[name])
    with Tracer():
        found = results(PROGRAMS[name])
        for mine, real in zip(found, expected, strict=True):
            assert (mine.shape, mine.stride(), mine.dtype) == (real.shape, real.stride(), real.dtype)
            assert mine.storage_offset() == real.storage_offset()
            assert storage(mine).nbytes() == storage(real).nbytes()
        assert sharing(found) == sharing(expected)
    assert any(isinstance(tensor, Valueless) for tensor in found)


def test_what_known_numbers_give_is_known():
    with Tracer() as tracer, tracer.section() as section:
        known = torch.tensor([2.0, 3.0])
        assert (known * known).tolist() == [4.0, 9.0]
        assert (known * torch.ones(2)).tolist() == [1.0, 1.0]
    assert section.work.kernels == 2  # `ones` and the product


def test_a_copy_of_a_module_has_weights_of_its_own():
    with Tracer():
        layer = nn.Linear(3, 2)
        layer.bias.requires_grad_(False)
        copied = copy.deepcopy(layer)
    assert [type(weight) for weight in copied.parameters()] == [Valueless, Valueless]
    assert [weight.requires_grad for weight in copied.parameters()] == [True, False]
    for weight, other in zip(layer.parameters(), copied.parameters(), strict=True):
        assert isinstance(other, nn.Parameter)
        assert (other.shape, other.dtype) == (weight.shape, weight.dtype)
        assert storage(other)._cdata != storage(weight)._cdata
