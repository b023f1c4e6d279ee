"""What sharded weights were predicted to need, against what torch allocates on two ranks."""

import pytest

from flowcorr.config.schema import LoraConfig
from flowcorr.correction import OFF
from flowcorr.distributed import fsdp
from flowcorr.instruments.plan.architecture import find_architecture
from flowcorr.instruments.plan.sharding import computed, of_rank
from flowcorr.instruments.plan.training import trace_training
from tests.conftest import small_config, start_run
from tests.instruments.plan.allocation import allocated

RANKS = 2
SECTIONS = {
    "model": {"path": "tiny_ocr", "max_sequence_length": 8},
    "actor": {"micro_batch_size": 1, "mini_batches": 1, "fsdp": True},
    "rollout": {"prompts_per_step": 2, "n": 2},
    "sampling": {"height": 32, "width": 64},  # activations that stand out of what is gathered
}


def sections(autocast, rank):
    """Of the run; an adapter's layers compute in float32, or in copies that autocast makes."""
    return {
        **SECTIONS,
        "model": {**SECTIONS["model"], "lora": LoraConfig(rank=rank)},
        "actor": {**SECTIONS["actor"], "autocast": autocast},
    }


def on_ranks(autocast, rank):
    """Bytes that one rank holds of weights and moments, and its peaks above them."""
    sampled = {**SECTIONS["rollout"], "dtype": "bfloat16" if autocast and not rank else "float32"}
    run = start_run(small_config(**{**sections(autocast, rank), "rollout": sampled}))
    dtype = run.family.dtype
    for name, rows in run.conditioning.items():
        run.conditioning[name] = rows.to(dtype) if rows.is_floating_point() else rows
    batch = run.batch()
    run.actor.update(batch, OFF, training_step=1)  # makes the optimizer's state
    run.actor.optimizer.adamw.zero_grad()
    weights = run.family.transformer.parameters()
    state = run.actor.optimizer.adamw.state().values()
    one = batch.rollout.select(slice(0, 1))
    recompute = allocated(lambda: run.actor.log_probs(one))
    updates = [allocated(lambda: run.actor.update(batch, OFF, training_step=2)) for _ in range(3)]
    return {
        "weights": sum(fsdp.local_shard(weight).nbytes for weight in weights),
        "moments": sum(fsdp.local_shard(value).nbytes for value in state if value.dim()),
        "recompute": recompute,
        # gloo works in threads of its own: what these free late is not always the same, and not the update's
        "update": min(updates),
    }


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("autocast", [False, True])
def test_two_ranks_allocate_what_was_predicted(autocast, rank, two_ranks):
    config = small_config(**sections(autocast, rank))
    whole = trace_training(computed(config), find_architecture("tiny_ocr"))
    predicted = of_rank(whole, config, RANKS)
    got = two_ranks.call(on_ranks, autocast, rank)[0]
    assert predicted.weights == pytest.approx(got["weights"], rel=0.05)
    assert predicted.moments == pytest.approx(got["moments"], rel=0.05)
    assert predicted.recompute.peak + predicted.gathered_forward == pytest.approx(got["recompute"], rel=0.15)
    update = predicted.gradients + max(predicted.backward.peak + predicted.gathered, predicted.step.peak)
    assert 0.85 * update < got["update"] < 2 * update
