import contextlib
import re
from unittest import mock

import pytest
import torch

from flowcorr import distributed
from flowcorr.actor import pass_bound
from flowcorr.actor.pass_bound import CPU_BYTES, bound_passes
from tests.actor.updates import assert_same, updated
from tests.conftest import small_config, start_run
from tests.tolerances import GRADIENTS

EXPLICIT = {"micro_batch_size": None, "fold_steps": True}


def rows_of(make_run, **sections):
    run = make_run(**sections)
    bound_passes(run.actor.scorer, run.sample())
    return run.actor.scorer.rows


def test_the_bound_is_one_of_bytes(make_run):
    """A row that has twice the tokens gets about half of the rows; blocks that are computed again change nothing."""
    size = {"width": 32, "num_inference_steps": 4, "sde_window_size": 2, "sde_window_range": (0, 3)}
    small, large = (rows_of(make_run, sampling={**size, "height": height}) for height in (16, 64))
    image, text = 8, 16
    assert small / large == pytest.approx((4 * image + text) / (image + text), rel=0.15)
    again = rows_of(make_run, sampling={**size, "height": 16}, actor={"gradient_checkpointing": True})
    assert again == small
    a_row = CPU_BYTES / small
    assert 1e5 < a_row < 2e6  # 24 tokens of 96 numbers, two blocks, some dozens of tensors each


@pytest.mark.parametrize("rows", [1, 5, 9, 16])
@pytest.mark.parametrize("level", ["step", "trajectory_mean"])
def test_any_bound_gives_the_same_gradient(make_run, monkeypatch, rows, level):
    monkeypatch.setattr(pass_bound, "_largest_pass", lambda *_: rows)
    chosen, metrics = updated(make_run, actor={"ratio_level": level})
    assert chosen.actor.scorer.rows == rows
    whole, expected = updated(make_run, actor={**EXPLICIT, "ratio_level": level})
    assert whole.actor.scorer.rows is None
    assert_same(chosen.gradient(), whole.gradient(), **GRADIENTS)
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)
    assert metrics["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-3, abs=1e-6)


def test_the_bound_is_found_once_and_logged(make_run, caplog):
    run = make_run()
    rollout = run.sample()
    with caplog.at_level("INFO"):
        bound_passes(run.actor.scorer, rollout)
        bound_passes(run.actor.scorer, rollout)
    (told,) = (record.getMessage() for record in caplog.records if record.name.startswith("flowcorr"))
    assert re.findall(r"\d+", told) == [str(run.actor.scorer.rows), "8"]
    assert all(parameter.grad is None for parameter in run.actor.weights.parameters.values())


def test_without_samples_a_later_call_decides(make_run):
    run = make_run()
    rollout = run.sample()
    bound_passes(run.actor.scorer, rollout.select(slice(0)))
    assert run.actor.scorer.rows is None
    bound_passes(run.actor.scorer, rollout)
    assert run.actor.scorer.rows > 1


@pytest.mark.parametrize(("fits", "row", "bound"), [(2, 100, 8), (1, 100, 1), (0, 100, None)])
def test_a_gpu_without_room_for_two_rows_takes_one(make_run, monkeypatch, fits, row, bound):
    """A GPU with 1000 bytes free beside the weights, of which 800 may be used, and passes of at most `fits` rows."""
    run = make_run()
    scorer, peaks = run.actor.scorer, []

    def score(rollout, true=scorer.score):
        if rollout.num_samples > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        peaks.append(50 + row * rollout.num_samples)
        return true(rollout)

    trained = sum(parameter.nbytes for parameter in run.actor.weights.parameters.values())
    monkeypatch.setattr(type(run.actor.weights), "device", torch.device("cuda"))
    monkeypatch.setattr(scorer, "score", score)
    monkeypatch.setattr(pass_bound, "free_memory", lambda device: 1000 + 3 * trained)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[-1])
    for name in ("reset_peak_memory_stats", "memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    with contextlib.nullcontext() if fits else pytest.raises(torch.OutOfMemoryError):
        bound_passes(scorer, run.sample())
    assert scorer.rows == bound
    assert all(parameter.grad is None for parameter in run.actor.weights.parameters.values())


def on_ranks(samples, sharded):
    """The bound of ranks with these numbers of samples, whose own memory allows 6 and 5 rows."""
    run = start_run(small_config())
    rank, rollout = distributed.rank(), run.sample()
    run.actor.weights.sharded = sharded
    with mock.patch.object(pass_bound, "_largest_pass", return_value=6 - rank):
        bound_passes(run.actor.scorer, rollout.select(slice(samples[rank])))
    return run.actor.scorer.rows


@pytest.mark.parametrize(
    ("samples", "sharded", "bound"),
    [((8, 8), False, 5), ((8, 0), False, 6), ((0, 0), False, None), ((8, 8), True, 5), ((8, 0), True, None)],
)
def test_all_ranks_take_the_smallest_bound(samples, sharded, bound, two_ranks):
    assert two_ranks.call(on_ranks, samples, sharded) == [bound] * 2
