"""The times of a step's phases, in several layouts of one trace."""

from dataclasses import replace

import pytest

from flowcorr.config import load
from flowcorr.plan.devices import GPUS
from flowcorr.plan.engine import ADAPTED
from flowcorr.plan.estimate import plan_of
from flowcorr.plan.timeline import HOST_BANDWIDTH

# The fake device has to be registered before a process computes its first gradient.
pytestmark = pytest.mark.fake_device

H100 = GPUS["h100-80gb"]
RAY = ("rollout.placement=ray", "rollout.num_workers=2", "rollout.batch_size=12")
OCR = "reward.terms=[{name: ocr, options: {detect: true}}]"


def plan(traces, *overrides, gpu=H100, ranks=1):
    return plan_of(traces, load("tiny_jpeg_lora", overrides), gpu=gpu, ranks=ranks)


def test_sampling_ahead_overlaps_with_training(traces):
    turns, ahead = (plan(traces, *RAY, f"rollout.max_staleness={steps}") for steps in (0, 1))
    sides = [ahead.seconds("sample", "decode"), ahead.seconds("recompute", "update", "sync")]
    assert ahead.seconds() == pytest.approx(max(sides))
    assert turns.seconds() == pytest.approx(sum(sides))


def test_an_engines_phase_has_the_band_of_its_kind(traces):
    made = plan(traces, "rollout.name=vllm_omni")
    sample = next(phase for phase in made.phases if phase.name == "sample")
    assert made.engine is ADAPTED
    assert sample.fastest <= sample.seconds <= sample.slowest
    update = next(phase for phase in made.phases if phase.name == "update")
    assert (update.fastest, update.slowest) == (0.75 * update.seconds, 1.25 * update.seconds)


def test_an_engine_of_adapters_is_slower_than_one_that_merges_them(traces):
    engine = ("rollout.name=vllm_omni", "rollout.batch_size=1")
    beside, merged = plan(traces, *engine), plan(traces, *engine, "rollout.engine.weight_sync=merged")
    saved = beside.seconds("sample") - merged.seconds("sample")
    assert saved > 0
    assert beside.merging.sampling == pytest.approx(saved)
    assert beside.merging.sync == pytest.approx(merged.seconds("sync") - beside.seconds("sync"))
    assert merged.merging is None
    assert plan(traces, *engine, "rollout.engine.quantization=fp8").merging is None  # which refuses to merge


def test_faster_links_shorten_what_ranks_exchange(traces):
    for overrides in ((), ("model.lora.rank=0", "actor.fsdp=true")):
        slow, fast = (
            plan(traces, *overrides, gpu=replace(H100, link=link), ranks=8).seconds("update")
            for link in (1e6, H100.link)
        )
        assert slow > 2 * fast


def test_an_engine_that_sleeps_moves_its_weights_twice_in_a_step(traces):
    awake, asleep = (
        plan(traces, "rollout.name=vllm_omni", f"rollout.engine.enable_sleep_mode={sleeps}")
        for sleeps in ("false", "true")
    )
    moved = (asleep.seconds("sync") - awake.seconds("sync")) * HOST_BANDWIDTH
    assert moved == pytest.approx(4 * traces.training.transformer)


def test_rewards_in_workers_are_scored_beside_sampling(traces):
    on_cores = (OCR, "reward.placement=ray")
    few, many = (plan(traces, *on_cores, f"reward.num_workers={cores}") for cores in (1, 8))
    assert few.seconds("reward ocr") == pytest.approx(8 * many.seconds("reward ocr"))
    hidden = plan(traces, *RAY, *on_cores, "reward.num_workers=1")
    beside = hidden.seconds("sample", "decode", "recompute")
    assert hidden.seconds("reward ocr") == pytest.approx(few.seconds("reward ocr") - beside)


def test_a_gold_model_of_evaluations_takes_memory_and_no_time(traces):
    model = traces.decoder
    without, at_evaluations, every_step = (
        plan(replace(traces, rewards=rewards, gold=gold), *RAY)
        for rewards, gold in (([], []), ([], [model]), ([model], []))
    )
    assert at_evaluations.seconds() == without.seconds() < every_step.seconds()
    assert at_evaluations.memory == every_step.memory
    assert at_evaluations.memory.idle == without.memory.idle + model.weights


def test_a_model_that_scores_in_workers_has_an_unknown_time(traces):
    scored = plan(traces, "reward.terms=[{name: pickscore}]", "reward.placement=ray")
    assert [phase.seconds for phase in scored.phases if phase.name == "reward pickscore"] == [None]
