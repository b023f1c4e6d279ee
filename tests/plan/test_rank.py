"""One rank's share of a run, in several layouts of one trace."""

import pytest

from flowcorr.config import load
from flowcorr.plan.rank import Rank
from flowcorr.plan.sharding import FORWARD

# The fake device has to be registered before a process computes its first gradient.
pytestmark = pytest.mark.fake_device

RAY = ("rollout.placement=ray", "rollout.batch_size=12")


def rank_of(traces, *overrides, ranks=1):
    return Rank.of(traces, load("tiny_jpeg_lora", overrides), ranks)


def test_ranks_share_prompts_whole(traces):
    one, three = rank_of(traces), rank_of(traces, ranks=3)
    assert (one.images, three.images) == (96, 36)  # 8 prompts, and at most 3
    assert one.groups == three.groups == 8


@pytest.mark.parametrize(
    ("workers", "staleness", "images"),
    [(2, 0, 48), (3, 0, 36), (3, 1, 32), (16, 0, 12)],  # a worker waits for the last group, or samples ahead
)
def test_workers_share_the_prompts_of_all_ranks(traces, workers, staleness, images):
    layout = (*RAY, f"rollout.num_workers={workers}", f"rollout.max_staleness={staleness}")
    for ranks in (1, 4):
        rank = rank_of(traces, *layout, ranks=ranks)
        assert rank.images * rank.sampled_share == pytest.approx(images)


def test_larger_batches_launch_fewer_kernels_and_gather_weights_less_often(traces):
    full = ("model.lora.rank=0", "actor.fsdp=true")
    few, many = (rank_of(traces, *full, f"rollout.batch_size={size}", ranks=2).sampling for size in (4, 12))
    assert few.flops == pytest.approx(many.flops)
    assert few.kernels == pytest.approx(3 * many.kernels)
    assert many.sent > 0
    assert few.sent == pytest.approx(3 * many.sent)


def test_gathered_weights_do_not_grow_with_the_rows_of_a_pass(traces):
    full = ("model.lora.rank=0", "actor.fsdp=true")
    peaks = [
        rank_of(traces, *full, f"rollout.batch_size={size}", ranks=2).sampling.peak for size in (4, 8, 12)
    ]
    a_row = (peaks[1] - peaks[0]) / 4
    assert peaks[2] - peaks[1] == pytest.approx(4 * a_row)
    gathered = peaks[0] - 4 * a_row
    assert gathered == pytest.approx(FORWARD * traces.training.part)


@pytest.mark.parametrize("ranks", [2, 8])
def test_each_pass_gathers_what_the_other_ranks_hold(traces, ranks):
    full = ("model.lora.rank=0", "actor.fsdp=true")
    steps = 2
    for fold, passes in (("true", 1), ("false", steps)):
        rank = rank_of(traces, *full, f"actor.fold_steps={fold}", ranks=ranks)
        assert rank.config.sampling.sde_window_size == steps
        others = (ranks - 1) / ranks * traces.training.transformer
        assert rank.training.recompute.sent == pytest.approx(passes * others)
        assert rank.training.backward.sent == pytest.approx(3 * passes * others)  # and reduces gradients


def test_an_engine_that_merges_computes_without_adapters(traces):
    engine = ("rollout.name=vllm_omni", "rollout.dtype=float32")
    beside, merged = (
        rank_of(traces, *engine, *more) for more in ((), ("rollout.engine.weight_sync=merged",))
    )
    assert merged.sampling.flops == beside.merged_sampling.flops < beside.sampling.flops
