"""AdamW with 8-bit moments beside torch's, resumed, and sharded."""

import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flowcorr import distributed
from flowcorr.actor.adamw import OPTIMIZERS, scheduled_lr
from flowcorr.config.schema import ActorConfig
from flowcorr.distributed import fsdp
from flowcorr.errors import MissingExtraError
from tests.actor.updates import FULL, assert_same, weights
from tests.conftest import small_config, start_run

LR = 1e-3
FULL_8BIT = {"model": FULL, "actor": {"optimizer": "adamw_8bit", "lr": LR, "mini_batches": 1}}
FULL_32BIT = {**FULL_8BIT, "actor": {**FULL_8BIT["actor"], "optimizer": "adamw"}}


def learned(run, *steps):
    """The weights after updates on the batch that the run came with."""
    batch = run.batch()
    for step in steps:
        run.update(batch, training_step=step)
    return weights(run)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("linear", [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1, 1, 0.2 + 0.4 * (1 + 2**-0.5), 0.6, 0.2 + 0.4 * (1 - 2**-0.5), 0.2]),
    ],
)
def test_the_learning_rate_falls_to_a_share(schedule, rates):
    actor = ActorConfig(lr=1.0, warmup_steps=2, lr_schedule=schedule, lr_min_ratio=0.2)
    assert [scheduled_lr(actor, update, 6) for update in range(7)] == pytest.approx(rates)


def test_without_bitsandbytes_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r"^actor\.optimizer=adamw_8bit .*flowcorr\[adam8bit\]"):
        optimizer_of("adamw_8bit", weight=matrix())


@pytest.mark.adam8bit
def test_the_first_update_is_adamws_and_later_ones_differ_by_the_precision_of_the_moments(make_run):
    """Moments are rounded after a step, in 8 bits by 1 % of the largest one of their block at the most."""
    start = together(weights(make_run(**FULL_8BIT)))
    for steps, least, most in ((1, 0.0, 1e-3), (3, 0.002, 0.05)):
        exact, rounded = (
            together(learned(make_run(**sections), *range(steps))) for sections in (FULL_32BIT, FULL_8BIT)
        )
        moved, error = exact - start, rounded - exact
        assert least <= error.norm() / moved.norm() <= most
        assert error.abs().max() < 5 * LR


def together(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@pytest.mark.parametrize("sections", [FULL_32BIT, pytest.param(FULL_8BIT, marks=pytest.mark.adam8bit)])
def test_a_resumed_optimizer_goes_on_with_the_same_bits(make_run, sections):
    run = make_run(**sections)
    batch = run.batch()
    for step in (1, 2):
        run.update(batch, training_step=step)
    other = make_run(**sections)
    other.actor.weights.load(run.actor.weights.snapshot().tensors)
    state = run.actor.optimizer.adamw.state()
    other.actor.optimizer.adamw.load_state(state)
    assert_same(other.actor.optimizer.adamw.state(), state, rtol=0, atol=0)
    for each in (run, other):
        each.update(batch, training_step=3)
    assert_same(weights(other), weights(run), rtol=0, atol=0)


@pytest.mark.adam8bit
def test_the_state_is_that_of_adamw_to_the_precision_of_the_moments():
    states = []
    for value in ("adamw", "adamw_8bit"):
        optimizer = optimizer_of(value, weight=matrix())
        step(optimizer, 3)
        states.append(optimizer.state())
    exact, rounded = states
    assert rounded.keys() == exact.keys()
    for name, value in exact.items():
        assert (rounded[name].dtype, rounded[name].shape) == (value.dtype, value.shape)
        assert (rounded[name] - value).norm() <= 0.02 * value.norm()


@pytest.mark.adam8bit
def test_gradients_of_zero_and_missing_ones_leave_the_weights():
    weight, other = matrix(), matrix()
    before = weight.detach().clone()
    optimizer = optimizer_of("adamw_8bit", weight=weight, other=other)
    step(optimizer, 2, size=0.0)
    optimizer.zero_grad()
    other.grad = torch.ones_like(other)
    optimizer.step(LR)
    assert torch.equal(weight, before)
    assert not torch.equal(other, before)


def matrix():
    return torch.nn.Parameter(torch.randn(70, 100, generator=torch.Generator().manual_seed(0)))


def optimizer_of(value, **weights):
    return OPTIMIZERS[value](weights, ActorConfig(optimizer=value, lr=LR))


def step(optimizer, times, size=1.0):
    draw = torch.Generator().manual_seed(1)
    for _ in range(times):
        for weight in optimizer.parameters.values():
            gradient = size * torch.randn(weight.shape, generator=draw)
            weight.grad = fsdp.shard_like(weight, gradient)
        optimizer.step(LR)


ROWS = {"one row": 1, "too short for 8 bits on each rank": 5, "uneven": 11}


def whole(rows):
    return torch.randn(rows, 1024, generator=torch.Generator().manual_seed(rows))


def sharded():
    """8-bit AdamW on weights that all ranks share."""
    mesh = init_device_mesh("cpu", (distributed.world_size(),))
    weights = {
        name: torch.nn.Parameter(distribute_tensor(whole(rows), mesh, [Shard(0)], src_data_rank=None))
        for name, rows in ROWS.items()
    }
    return OPTIMIZERS["adamw_8bit"](weights, ActorConfig(optimizer="adamw_8bit", lr=LR))


def on_ranks():
    """The weights and the state after three steps, and how far a run ends from it that is resumed after two."""
    first, second = sharded(), sharded()
    step(first, 2)
    state = distributed.from_main(first.state(), "the state")
    for name, weight in first.parameters.items():
        second.parameters[name].data.copy_(weight.data)
    second.load_state(state)
    ends = []
    for optimizer in (first, second):
        step(optimizer, 1)
        ends.append({name: fsdp.full_tensor(weight.data) for name, weight in optimizer.parameters.items()})
    same = all(torch.equal(ends[0][name], ends[1][name]) for name in ROWS)
    return ends[0], distributed.from_main(first.state(), "the state"), same


@pytest.mark.adam8bit
def test_sharded_weights_learn_and_resume_as_whole_ones(two_ranks):
    weights = {name: torch.nn.Parameter(whole(rows)) for name, rows in ROWS.items()}
    optimizer = optimizer_of("adamw_8bit", **weights)
    step(optimizer, 2)
    step(optimizer, 1)
    for ends, state, same in two_ranks.call(on_ranks):
        assert same
        assert state.keys() == optimizer.state().keys()
        for name, weight in weights.items():
            error, moved = (ends[name] - weight).norm(), (whole(ROWS[name]) - weight).norm()
            assert error <= 0.05 * moved
        optimizer.load_state(state)  # of another number of ranks
        for name, value in optimizer.state().items():
            assert (state[name] - value).norm() <= 0.02 * value.norm()


def full_update():
    """The weights after two updates of the embedded model, whose weights are sharded."""
    run = start_run(small_config(**{**FULL_8BIT, "actor": {**FULL_8BIT["actor"], "fsdp": True}}))
    learned(run, 1, 2)
    return {name: fsdp.full_tensor(weight.data) for name, weight in run.actor.weights.parameters.items()}


@pytest.mark.adam8bit
def test_a_sharded_model_is_trained_as_a_whole_one(two_ranks, make_run):
    run = make_run(**FULL_8BIT)
    start = weights(run)
    expected = learned(run, 1, 2)
    for found in two_ranks.call(full_update):
        for name, before in start.items():
            assert (found[name] - expected[name]).norm() <= 0.1 * (expected[name] - before).norm() + 1e-6
