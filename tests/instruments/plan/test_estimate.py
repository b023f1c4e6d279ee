from dataclasses import replace

import pytest

from flowcorr.config import ModelConfig, load
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.answers import MARGIN
from flowcorr.instruments.plan.devices import GPUS
from flowcorr.instruments.plan.estimate import IN_8_BITS, OFFLOAD, make_plan, other_changes, plan_of
from flowcorr.instruments.plan.traces import trace
from flowcorr.models import load_family

H100 = GPUS["h100-80gb"]


def plan(*overrides, gpu=H100, ranks=1, recipe="tiny_jpeg_lora"):
    return make_plan(load(recipe, overrides), gpu=gpu, ranks=ranks, title=recipe)


def plans_on(gpus, *overrides, ranks=1):
    """A plan on each GPU, of one trace."""
    config = load("tiny_jpeg_lora", overrides)
    traces = trace(config, ranks)
    return [plan_of(traces, config, gpu=gpu, ranks=ranks) for gpu in gpus]


@pytest.fixture(scope="module")
def tiny():
    return plan()


def test_a_plan_has_each_phase(tiny):
    names = [phase.name for phase in tiny.phases]
    assert names == ["sample", "decode", "reward jpeg_compressibility", "recompute", "update", "sync"]
    assert [*tiny.memory.phases] == [
        "load", "encode", "reward", "recompute", "update", "sync", "evaluate", "sample", "decode",
    ]  # fmt: skip
    assert tiny.seconds() == pytest.approx(sum(phase.seconds or 0 for phase in tiny.phases))


def test_offloaded_text_encoders_leave_the_trainers_peak_to_training(tiny):
    offloaded = plan(OFFLOAD).memory
    assert tiny.changes[OFFLOAD] == offloaded
    assert offloaded.phases["load"] < tiny.memory.phases["load"]
    assert offloaded.phases["load"] < offloaded.phases["encode"] < tiny.memory.phases["encode"]
    assert offloaded.phases["update"] == tiny.memory.phases["update"]


def test_longer_steps_save_their_calls(tiny):
    """Of its 10 steps, 6 come after the range: two of three steps each are left of them."""
    longer = plan("sampling.post_window_stride=3")
    flops = [next(phase.flops for phase in each.phases if phase.name == "sample") for each in (tiny, longer)]
    assert flops[1] == pytest.approx(0.6 * flops[0])
    assert longer.seconds("sample") == pytest.approx(0.6 * tiny.seconds("sample"))
    assert longer.seconds("recompute") == tiny.seconds("recompute")


def test_only_what_is_learned_from_is_recomputed(tiny):
    """Of 24 sampled, 12 cost the sampling and decoding of 24, and the recompute and the update of 12."""
    chosen, more = plan("rollout.n=24", "rollout.n_learned=12"), plan("rollout.n=24")
    flops = [{phase.name: phase.flops for phase in each.phases} for each in (tiny, chosen, more)]
    assert chosen.images == more.images == 2 * tiny.images
    for phase in ("sample", "decode"):
        assert flops[1][phase] == flops[2][phase] == pytest.approx(2 * flops[0][phase])
    for phase in ("recompute", "update"):
        assert 2 * flops[1][phase] == pytest.approx(2 * flops[0][phase]) == pytest.approx(flops[2][phase])
    # The samples of all are held, and copies of those that are learned from.
    held = [each.memory.phases["sync"] for each in (tiny, more, chosen)]
    assert held == sorted(held)
    assert held[2] - held[1] == pytest.approx(held[1] - held[0], rel=0.05)


def test_bypass_mode_has_no_recompute_pass(tiny):
    bypass = plan("algorithm.rollout_correction.preset=bypass_ppo_clip")
    assert bypass.seconds("recompute") == 0 < tiny.seconds("recompute")
    assert bypass.seconds() < tiny.seconds()


def test_the_largest_micro_batch_is_the_largest_that_fits(tiny):
    memory = tiny.memory
    sizes = (1, 7, 20)
    needed = [memory.update_fixed + size * memory.update_a_sample for size in sizes]
    gpus = [replace(H100, memory=1.01 * size * MARGIN) for size in needed]
    plans = plans_on(gpus, "actor.micro_batch_size=32", "actor.fold_steps=true")
    for size, small in zip(sizes, plans, strict=True):
        assert small.largest_micro_batch == pytest.approx(size, abs=1)


def test_an_engine_of_its_own_is_weighed_beside_the_trainer(tiny):
    assert tiny.memory.engine == 0
    beside = plan("rollout.name=vllm_omni")
    assert beside.memory.engine > 0
    assert beside.memory.shared > beside.memory.trainer
    assert beside.fits(beside.memory.shared)
    asleep = plan("rollout.name=vllm_omni", "rollout.engine.enable_sleep_mode=true")
    assert asleep.memory.shared < beside.memory.shared
    assert asleep.seconds("sync") > beside.seconds("sync")


def test_an_engine_without_a_number_of_gpus_has_one():
    engines = [
        plan("rollout.name=vllm_omni", f"rollout.engine={{tensor_parallel_size: {gpus}}}").memory.engine
        for gpus in ("null", 1, 2)
    ]
    assert engines[0] == engines[1] > engines[2]


def test_sampling_ahead_overlaps_with_training():
    ray = ("rollout.placement=ray", "rollout.num_workers=2", "rollout.batch_size=12")
    turns, ahead = (plan(*ray, f"rollout.max_staleness={steps}") for steps in (0, 1))
    sides = [ahead.seconds("sample", "decode"), ahead.seconds("recompute", "update", "sync")]
    assert ahead.seconds() == pytest.approx(max(sides))
    assert turns.seconds() == pytest.approx(sum(sides))


def test_faster_links_shorten_what_ranks_exchange():
    gpus = [replace(H100, link=1e6), H100]
    for overrides in ((), ("model.lora.rank=0", "actor.fsdp=true")):
        slow, fast = (made.seconds("update") for made in plans_on(gpus, *overrides, ranks=8))
        assert slow > 2 * fast


def test_a_model_that_is_nowhere_is_an_error_that_names_what_is_known():
    with pytest.raises(ConfigError, match=r"model\.path='nobody/nothing' .*/FLUX\.1-dev,"):
        plan("model.path=nobody/nothing")


def test_moments_in_8_bits_save_three_quarters_of_their_memory(tiny):
    full = ("model.lora.rank=0", "actor.micro_batch_size=1")
    before, after = plan(*full), plan(*full, IN_8_BITS)
    idle = [made.memory.phases["recompute"] for made in (before, after)]
    moments = 2 * (before.memory.phases["sync"] - before.memory.phases["reward"])  # twice the gradients
    assert 0.7 < (idle[0] - idle[1]) / moments < 0.75
    assert before.changes[IN_8_BITS] == after.memory
    assert IN_8_BITS not in {*after.changes, *tiny.changes}


def transformer_bytes():
    return sum(parameter.nbytes for parameter in load_family(ModelConfig()).transformer.parameters())


@pytest.mark.filterwarnings("ignore:model")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 16])
def test_an_average_is_kept_in_float32(rank, dtype):
    dtypes = [f"{key}={dtype}" for key in ("model.dtype", "model.lora.dtype", "rollout.dtype")]
    run = (f"model.lora.rank={rank}", *dtypes)
    without, averaged = (plan(*run, *more).memory for more in ((), ("actor.ema=0.9",)))
    trained = without.phases["sync"] - without.phases["reward"]  # as many bytes as the gradients
    bytes_a_weight = {"float32": 4, "bfloat16": 2}[dtype]
    added = averaged.phases["reward"] - without.phases["reward"]
    assert added == pytest.approx(4 * trained / bytes_a_weight)


def test_an_evaluation_needs_more_with_more_or_larger_images():
    two, four, eight = (plan(f"rollout.batch_size={size}").memory.phases for size in (2, 4, 8))
    of_two = four["evaluate"] - two["evaluate"]
    assert of_two > 0
    assert eight["evaluate"] - four["evaluate"] == pytest.approx(2 * of_two, rel=0.05)
    size = {"trainer.eval_height": 64, "trainer.eval_width": 128}  # twice those of the embedded model
    larger = plan("rollout.batch_size=2", *(f"{key}={pixels}" for key, pixels in size.items())).memory.phases
    assert larger["evaluate"] - two["evaluate"] == pytest.approx(3 * of_two, rel=0.2)
    assert {**larger, "evaluate": 0} == {**two, "evaluate": 0}


def test_no_more_images_are_decoded_together_than_are_sampled_together():
    two, four, eight, all_of_them = (
        plan(*more).memory.phases for more in (*((f"rollout.batch_size={size}",) for size in (2, 4, 8)), ())
    )
    of_two = four["decode"] - two["decode"]
    assert of_two > 0
    assert eight["decode"] - four["decode"] == pytest.approx(2 * of_two, rel=0.05)
    assert all_of_them["decode"] - eight["decode"] == pytest.approx(4 * of_two, rel=0.05)  # 16 at most


def test_an_evaluation_holds_the_weights_beside_their_average():
    without, averaged = (plan(*more).memory.phases for more in ((), ("actor.ema=0.9",)))
    added = {name: averaged[name] - without[name] for name in averaged}
    assert added["evaluate"] == pytest.approx(2 * added["sample"])
    assert added["sample"] > 0


def test_an_evaluation_on_both_bases_holds_the_unquantized_one_too():
    quantized, both = "model.quantization=int8", "trainer.eval_on=both"
    alone, beside = plan(quantized), plan(quantized, both)
    added = beside.memory.phases["evaluate"] - alone.memory.phases["evaluate"]
    adapter = alone.memory.phases["sync"] - alone.memory.phases["reward"]  # as many bytes as its gradients
    assert added == pytest.approx(transformer_bytes() + adapter, rel=0.03)
    assert beside.changes["trainer.eval_on=trained"] == alone.memory
    assert "trainer.eval_on=trained" not in alone.changes


def test_a_ray_worker_that_samples_ahead_holds_the_transformer_twice():
    worker, ahead = (
        plan("rollout.placement=ray", f"rollout.max_staleness={steps}").memory for steps in (0, 1)
    )
    assert ahead.engine - worker.engine == pytest.approx(transformer_bytes(), rel=0.05)  # it has buffers, too


def test_kl_of_all_weights_holds_the_untrained_ones_too():
    without, with_kl = (
        plan("model.lora.rank=0", *more).memory.phases for more in ((), ("actor.kl_coef=0.1",))
    )
    assert with_kl["reward"] - without["reward"] == pytest.approx(transformer_bytes(), rel=0.05)


ALL_WEIGHTS = ("model.lora.rank=0", "rollout.placement=ray", "rollout.batch_size=12")


def test_old_weights_of_ray_workers_take_main_memory_and_no_gpus():
    fresh, stale = (plan(*ALL_WEIGHTS, f"rollout.staleness={age}").memory for age in (0, 2))
    shared = plan("model.lora.rank=0", "rollout.batch_size=12").memory
    assert fresh.phases["reward"] == stale.phases["reward"] == shared.phases["reward"]
    assert (
        stale.phases["sync"] - stale.phases["reward"] > 2 * transformer_bytes() * 0.99
    )  # gradients, and a copy


def test_a_ray_worker_keeps_the_trained_weights_that_it_loaded():
    whole, adapted = (plan(*ALL_WEIGHTS[1:], f"model.lora.rank={rank}").memory for rank in (0, 16))
    phases = plan().memory.phases
    adapter = phases["sync"] - phases["reward"]  # as many bytes as its gradients
    assert whole.engine - adapted.engine == pytest.approx(transformer_bytes() - 2 * adapter, rel=0.05)


def test_a_quantized_base_needs_less_and_an_engine_of_its_own_none_the_less(tiny):
    quantized = plan("model.quantization=int8")
    saved = tiny.memory.phases["load"] - quantized.memory.phases["load"]
    assert 0.6 * transformer_bytes() < saved < 0.75 * transformer_bytes()
    engine = ("rollout.name=vllm_omni", "rollout.dtype=float32")
    alone, beside = plan(*engine), plan(*engine, "model.quantization=int8")
    assert beside.memory.engine == pytest.approx(alone.memory.engine, rel=0.01)


def test_a_ray_worker_in_process_holds_the_quantized_weights():
    worker = "rollout.placement=ray"
    whole, quantized = plan(worker).memory.engine, plan(worker, "model.quantization=int8").memory.engine
    assert 0.6 * transformer_bytes() < whole - quantized < 0.75 * transformer_bytes()


ADAPTER_WAYS = ("actor.fsdp=true on several ranks", "model.quantization=nf4", "a smaller model.lora.rank")
BYPASS = "algorithm.rollout_correction.preset=bypass_ppo_clip"


@pytest.mark.parametrize(
    ("overrides", "ranks", "expected"),
    [
        ((), 1, ADAPTER_WAYS),
        (("model.quantization=int8",), 2, ADAPTER_WAYS[2:]),
        # Beside an engine on the unquantized base, bypass mode may not have NF4; with FSDP2 nothing may.
        (("rollout.name=vllm_omni", BYPASS), 1, (ADAPTER_WAYS[0], ADAPTER_WAYS[2])),
        (("actor.fsdp=true",), 2, ("more ranks", ADAPTER_WAYS[2])),
        (("model.lora.rank=0",), 1, ("actor.fsdp=true on several ranks", "actor.optimizer=adamw_8bit")),
        (
            ("model.lora.rank=0", "rollout.name=vllm_omni", "actor.optimizer=adamw_8bit"),
            2,
            ("actor.fsdp=true on several ranks (with rollout.name=in_process rollout.placement=local)",),
        ),
        (("model.lora.rank=0", "actor.fsdp=true", "actor.optimizer=adamw_8bit"), 2, ("more ranks",)),
    ],
)
def test_a_run_that_fits_nowhere_is_told_what_saves_memory_of_its_update(tiny, overrides, ranks, expected):
    assert other_changes(load("tiny_jpeg_lora", overrides), ranks) == expected
    assert tiny.other_changes == ADAPTER_WAYS


def test_ranks_that_share_the_weights_need_less_of_each_gpu():
    full = ("model.lora.rank=0", "actor.micro_batch_size=1")
    whole = plan(*full, ranks=8).memory.phases
    shards = plan(*full, "actor.fsdp=true", ranks=8).memory.phases
    assert shards["reward"] < 0.6 * whole["reward"]  # the VAE and the samples stay
    assert shards["update"] < whole["update"]
