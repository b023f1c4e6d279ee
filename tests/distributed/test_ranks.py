"""What ranks tell each other, in real processes; run as a script, this file is one of them."""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flowcorr import distributed, metrics
from flowcorr.advantages import group_advantages
from flowcorr.correction import compute_rollout_correction_and_rejection_mask
from flowcorr.distributed import RankError
from flowcorr.metrics import Metrics
from tests.ranks import Ranks, end_with_first, start_ranks

RANKS = 3
SIZES = (9, 0, 6)  # samples of each rank: one has none
BOUNDS = (slice(0, 9), slice(9, 9), slice(9, 15))
RULES = {
    "rollout_is": "token",
    "rollout_is_batch_normalize": True,
    "rollout_rs": "step_z,token_k1,seq_mean_k3",
    "rollout_rs_threshold": [6.0, "auto", "auto"],
    "num_elements": 64,
    "num_steps": 4,
}


def terms():
    """Log-probs of 15 samples and 2 steps that differ by noise and two outliers."""
    draw = torch.Generator().manual_seed(0)
    rollout = torch.randn(15, 2, generator=draw)
    target = rollout + 1e-3 * torch.randn(15, 2, generator=draw)
    target[4, 1] += 0.1
    target[12, 0] -= 0.2
    return target, rollout, torch.tensor([[0, 1], [2, 3]]).repeat(8, 1)[:15]


def corrected(part):
    target, rollout, indices = (tensor[part] for tensor in terms())
    found = compute_rollout_correction_and_rejection_mask(target, rollout, step_indices=indices, **RULES)
    return found.weights, found.keep, found.metrics.across_ranks().compute()


def advantages(part):
    rewards, groups = torch.linspace(0, 1, 15).double().square(), torch.arange(15) // 3
    return group_advantages(rewards[part], groups[part], std="global")


@pytest.fixture(scope="module")
def told():
    """What each of three ranks found out."""
    ranks = Ranks(RANKS)
    found = ranks.call(talk)
    ranks.close()
    return found


def talk():
    place = distributed.rank()
    rows = torch.arange(SIZES[place])[:, None] + 100.0 * place
    mine = Metrics({"mean": metrics.mean(place, 1)})
    if place == 1:
        mine = mine.merge({"of one": metrics.total(7)})
    found = {
        "rank": (place, distributed.world_size(), distributed.is_main()),
        "share": list(distributed.local_indices(8)),
        "sum": distributed.add_up(torch.tensor([1.0, place]), "a sum"),
        "rows": distributed.gather_rows(rows, "rows"),
        "objects": distributed.gather({"from": place}, "objects"),
        "on main": distributed.gather_on_main(place, "something for the main rank"),
        "decision": distributed.from_main(f"of rank {place}", "a decision"),
        "metrics": mine.across_ranks().compute(),
        "correction": corrected(BOUNDS[place]),
        "advantages": advantages(BOUNDS[place]),
    }
    try:
        with distributed.fail_together("a task"):
            if place == 2:
                raise KeyError("lost")
    except (RankError, KeyError) as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    found["afterwards"] = distributed.gather(place, "the time after a failure")
    return found


def test_ranks_know_their_places(told):
    assert [found["rank"] for found in told] == [(0, 3, True), (1, 3, False), (2, 3, False)]


def test_shares_are_consecutive_and_nearly_equal(told):
    assert [found["share"] for found in told] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_sums_rows_and_objects_are_those_of_all_ranks(told):
    for found in told:
        assert found["sum"].tolist() == [3, 3]
        assert found["rows"].flatten().tolist() == [*range(9), *range(200, 206)]
        assert found["objects"] == [{"from": 0}, {"from": 1}, {"from": 2}]
        assert found["decision"] == "of rank 0"
    assert [found["on main"] for found in told] == [[0, 1, 2], None, None]


def test_metrics_merge_where_ranks_have_different_ones(told):
    for found in told:
        assert found["metrics"] == {"mean": 1.0, "of one": 7.0}


def test_a_correction_is_that_of_the_whole_batch(told):
    weights, keep, values = corrected(slice(None))
    assert 0 < keep.sum() < keep.numel()
    for part, found in zip(BOUNDS, told, strict=True):
        got_weights, got_keep, got_values = found["correction"]
        torch.testing.assert_close(got_weights, weights[part], rtol=1e-6, atol=0)
        assert torch.equal(got_keep, keep[part])
        assert got_values == pytest.approx(values, rel=1e-9, abs=1e-12)


def test_a_global_std_is_of_all_rewards(told):
    whole = advantages(slice(None))
    for part, found in zip(BOUNDS, told, strict=True):
        assert torch.equal(found["advantages"], whole[part])


def test_a_failure_of_one_rank_is_that_of_all_and_they_can_go_on(told):
    theirs = "RankError: rank 2 failed during a task: KeyError: 'lost'"
    assert [found["failure"] for found in told] == [theirs, theirs, "KeyError: 'lost'"]
    assert all(found["afterwards"] == [0, 1, 2] for found in told)


@pytest.fixture(scope="module")
def parted():
    """What each of two ranks saw before and after the second one left."""
    ranks = Ranks(2)
    found = ranks.call(part)
    ranks.close()
    return found


def part():
    """The second rank fails twice; the first one is waiting for it the second time, and then fails itself."""
    second = distributed.rank() == 1
    found = {"together": failure_of(raise_if, second, KeyError("forgiven"))}
    distributed.gather(None, "the last thing together")
    if second:
        found["waited for"] = failure_of(raise_if, second, OSError("caf\udce9.png"), has_collectives=True)
        distributed.leave_ranks()
        return found
    found["waiting"] = failure_of(dist.all_reduce, torch.ones(3), has_collectives=True)
    found["alone"] = failure_of(raise_if, True, ValueError("the cause"))
    return found


def raise_if(condition, error):
    if condition:
        raise error


def failure_of(block, *arguments, **how):
    try:
        with distributed.fail_together("a task", **how):
            block(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_waits_inside_a_block_is_told_why(parted):
    first, second = parted
    assert second["waited for"] == "OSError: caf\udce9.png"
    assert first["waiting"].startswith("RankError: ")
    assert first["waiting"].endswith(r"rank 1 failed: OSError: caf\udce9.png")


def test_a_failure_is_raised_although_another_rank_does_not_answer(parted):
    assert parted[0]["alone"] == "ValueError: the cause"


@pytest.mark.parametrize("failed", ["a block", "a run"])
def test_a_rank_that_goes_on_after_a_failure_is_not_blamed_for_the_next(failed):
    ranks = Ranks(2)
    first, _ = ranks.call(go_on, failed)
    ranks.close()
    waiting, _, blamed = first.partition(": ")
    assert waiting.endswith("the gradients")
    assert blamed.startswith("rank 1 ended")
    assert "handled" not in first
    assert "run before" not in first


def go_on(failed):
    if failed == "a block":
        failure_of(raise_if, distributed.rank() == 1, KeyError("handled"))
    else:
        distributed.report_failure(ValueError("of the run before"))
        with distributed.fail_together("the start of the next run"):
            pass
    distributed.gather(None, "the last thing together")
    if distributed.rank() == 1:
        distributed.leave_ranks()
        return None
    with pytest.raises(RankError) as caught:
        distributed.gather(None, "the gradients")
    return str(caught.value)


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("raises", "rank 1 failed: ValueError: no more"),
        pytest.param("dies", "rank 1 ended or hangs after the last thing together", marks=pytest.mark.slow),
        ("hangs", "rank 1 ended or hangs after the last thing together"),
    ],
)
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.multi_gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
            ],
        ),
    ],
)
def test_a_rank_that_does_not_answer_is_named(ending, said, device):
    first, _ = end_with_first(start_ranks(2, Path(__file__), ending, device), timeout=600)
    assert first.stdout.partition(": ")[0].endswith("the gradients"), first.stderr
    assert first.stdout.strip().endswith(said)


def stop_answering(ending, device):
    distributed.gather(None, "the last thing together")
    if distributed.is_main():
        try:
            distributed.add_up(torch.zeros(3, device=device), "the gradients")
        except RankError as error:
            print(error, flush=True)
    elif ending == "raises":
        distributed.report_failure(ValueError("no more"))
    elif ending == "hangs":
        time.sleep(600)
    os._exit(0)


@pytest.mark.parametrize(
    ("ending", "said"), [("dies", "the address of a cluster"), ("hangs", "trainer.collective_timeout=1 s")]
)
def test_a_value_that_the_main_rank_does_not_leave_is_not_waited_for_without_end(ending, said):
    ranks = Ranks(2)
    _, error = ranks.call(wait_for_main, ending)
    ranks.close()
    assert error.startswith("RankError: rank 1 of 2 gave up waiting for the address of a cluster: ")
    assert said in error


def wait_for_main(ending):
    if distributed.is_main():
        if ending == "dies":
            raise SystemExit(0)  # and its store with it
        return None
    if ending == "hangs":
        dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=1))
    try:
        distributed.published("address of a cluster")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_one_rank_alone_waits_for_nobody():
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
    assert distributed.local_indices(5) == range(5)
    values = torch.ones(2)
    assert distributed.add_up(values, "") is values
    assert distributed.gather_rows(values, "") is values
    assert distributed.gather(values, "")[0] is values
    assert distributed.gather_on_main(values, "")[0] is values
    assert distributed.from_main(values, "") is values
    with pytest.raises(KeyError), distributed.fail_together("nothing"):
        raise KeyError


def start_group(backend, *, seconds):
    """Wait for all ranks as long as it takes; only then does the clock of the collectives run."""
    place, number = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, number, place == 0, timeout=datetime.timedelta(seconds=600))
    store.set(f"{place} is here", "")
    store.wait([f"{other} is here" for other in range(number)])
    dist.init_process_group(
        backend, store=store, rank=place, world_size=number, timeout=datetime.timedelta(seconds=seconds)
    )


if __name__ == "__main__":
    if sys.argv[2] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if sys.argv[2] == "cuda" else "gloo"
    start_group(backend, seconds=5)
    stop_answering(*sys.argv[1:])
    dist.destroy_process_group()
