import json
from dataclasses import replace

import pytest

from flowcorr.config import ModelConfig, load
from flowcorr.data import load_prompts
from flowcorr.errors import ConfigError
from flowcorr.models import load_family
from flowcorr.plan.answers import MARGIN
from flowcorr.plan.devices import GPUS, find_gpu
from flowcorr.plan.estimate import make_plan, other_ways

# The fake device has to be registered before a process computes its first gradient.
pytestmark = pytest.mark.fake_device

H100 = GPUS["h100-80gb"]


def plan(*overrides, gpu=H100, ranks=1, recipe="tiny_jpeg_lora"):
    return make_plan(load(recipe, overrides), gpu=gpu, ranks=ranks, title=recipe)


@pytest.fixture(scope="module")
def tiny():
    return plan()


def test_a_plan_has_a_row_for_each_phase_and_survives_json(tiny):
    names = [phase.name for phase in tiny.phases]
    assert names == [
        "load", "encode prompts", "sample", "decode", "reward jpeg_compressibility", "recompute", "update", "sync",
    ]  # fmt: skip
    mapping = json.loads(json.dumps(tiny.to_mapping(), allow_nan=False))
    assert mapping["fits"] is True
    assert mapping["trainer_peak"] == tiny.memory.trainer == max(phase.peak or 0 for phase in tiny.phases)
    assert mapping["tolerance"] == {"memory": 0.05, "fragmentation": 0.08, "time": 0.25}
    assert mapping["step_seconds"] == pytest.approx(sum(phase.seconds or 0 for phase in tiny.phases[2:]))


def test_guidance_encodes_one_negative_prompt(tiny):
    guided = plan("sampling.guidance_scale=3")
    one, more = (
        next(part.flops for part in made.phases if part.name == "encode prompts") for made in (tiny, guided)
    )
    data = load_prompts(load("tiny_jpeg_lora").data)
    prompts = len({prompt.text for prompt in (*data.train, *data.heldout)})
    assert more == pytest.approx(one * (prompts + 1) / prompts)


def test_offloaded_text_encoders_leave_the_trainers_peak_to_training(tiny):
    offloaded = plan("model.offload_text_encoders=true").memory
    assert tiny.ways_to_fit["model.offload_text_encoders=true"] == offloaded
    assert offloaded.load < tiny.memory.load
    assert offloaded.load < offloaded.encode < tiny.memory.encode
    assert offloaded.update == tiny.memory.update


def test_bypass_mode_has_no_recompute_pass_and_says_what_it_saves(tiny):
    bypass = plan("algorithm.rollout_correction.preset=bypass_ppo_clip")
    assert bypass.seconds("recompute") == 0 < tiny.seconds("recompute")
    assert bypass.seconds() < tiny.seconds()
    assert "would save the recompute pass" in tiny.answers()[-1]
    assert "has no recompute pass" in bypass.answers()[-1]


@pytest.mark.slow
def test_ranks_share_the_images_and_the_time(tiny):
    four = plan(ranks=4)
    assert (tiny.images, four.images) == (96, 24)
    update = {
        made.ranks: next(phase for phase in made.phases if phase.name == "update") for made in (tiny, four)
    }
    assert update[4].flops == pytest.approx(update[1].flops / 4, rel=0.01)


def test_the_largest_micro_batch_is_the_largest_that_fits(tiny):
    memory = tiny.memory
    for size in (1, 7, 20):
        needed = memory.update_without_samples + size * memory.update_a_sample
        small = replace(tiny, gpu=replace(H100, memory=1.001 * needed * MARGIN))
        assert small.largest_micro_batch() == size
        assert f"use actor.micro_batch_size={size}." in small.answers()[1]
    again = plan("actor.micro_batch_size=20")
    assert again.memory.update == pytest.approx(
        memory.update_without_samples + 20 * memory.update_a_sample, rel=0.05
    )


@pytest.mark.parametrize(("size", "folded"), [(7, True), (0.5, False)])
def test_passes_that_a_run_chooses_are_those_that_fit(tiny, size, folded):
    memory = tiny.memory
    needed = MARGIN * (memory.update_without_samples + size * memory.update_a_sample)
    gpu = f"memory={1.05 * needed / 1e9},bandwidth=100,bf16=10"
    made = plan(gpu=find_gpu(gpu))
    assert made.fits(made.memory.update)
    assert made.micro_batch == (7 if folded else 1)


def test_another_micro_batch_takes_no_other_copies_of_weights():
    autocast = ("model.lora.rank=0", "actor.autocast=true")
    memory = plan(*autocast, "actor.micro_batch_size=4").memory
    again = plan(*autocast, "actor.micro_batch_size=12").memory
    predicted = memory.update_without_samples + 12 * memory.update_a_sample
    assert again.update == pytest.approx(predicted, rel=0.01)
    assert again.update_without_samples == pytest.approx(memory.update_without_samples, rel=0.01)


def test_an_engine_samples_in_its_own_precision_without_autocast():
    full = ("model.lora.rank=0", "actor.micro_batch_size=4")
    high, low, copying = (
        plan(*full, "rollout.name=vllm_omni", *more)
        for more in ((), ("rollout.dtype=bfloat16",), ("actor.autocast=true",))
    )
    assert copying.memory.engine == high.memory.engine > 1.5 * low.memory.engine
    assert copying.seconds("sample") == high.seconds("sample")
    flops = [
        next(part.flops for part in made.phases if part.name == "sample") for made in (high, low, copying)
    ]
    assert flops == [flops[0]] * 3


def test_a_gpu_that_is_too_small_is_told_so(tiny):
    small = replace(tiny, gpu=find_gpu("memory=0.01,bandwidth=100,bf16=10"))
    fit, micro_batch, *_ = small.answers()
    assert not small.fitting
    assert fit.startswith("Does not fit")
    assert micro_batch.startswith("No actor.micro_batch_size fits")


def test_a_peak_within_the_margin_of_the_memory_may_not_fit(tiny):
    tight = replace(tiny, gpu=replace(H100, memory=1.05 * tiny.memory.trainer))
    assert tight.answers()[0].startswith("May not fit")


def test_an_engine_of_its_own_is_weighed_beside_the_trainer(tiny):
    beside = plan("rollout.name=vllm_omni")
    assert tiny.memory.engine == 0
    assert beside.memory.engine > 0
    assert beside.memory.shared == beside.memory.trainer + beside.memory.engine
    assert "can share a GPU" in beside.answers()[2]
    crowded = replace(beside, gpu=replace(H100, memory=MARGIN * 1.01 * beside.memory.trainer))
    assert "cannot share a GPU" in crowded.answers()[2]
    asleep = replace(beside.memory, engine_sleeps=True)
    assert asleep.shared < beside.memory.shared


@pytest.mark.slow
def test_an_engine_that_samples_here_with_other_weights_keeps_a_copy(tiny):
    stale = plan("rollout.staleness=1")
    assert stale.memory.idle > tiny.memory.idle


@pytest.mark.slow
def test_a_faster_gpu_predicts_a_shorter_step():
    slow, fast = plan(gpu=GPUS["l40s-48gb"]), plan(gpu=GPUS["b200-180gb"])
    assert [phase.flops for phase in slow.phases] == [phase.flops for phase in fast.phases]
    assert fast.seconds() <= slow.seconds()


def test_a_model_that_is_nowhere_is_an_error_that_names_what_is_known():
    with pytest.raises(ConfigError, match=r"nobody/nothing.*black-forest-labs/FLUX\.1-dev"):
        plan("model.path=nobody/nothing")


def test_moments_in_8_bits_save_three_quarters_of_their_memory(tiny):
    full, in_8_bits = ("model.lora.rank=0", "actor.micro_batch_size=1"), "actor.optimizer=adamw_8bit"
    before, after = plan(*full), plan(*full, in_8_bits)
    weights = before.memory.sync - before.memory.idle  # their gradients
    saved = before.memory.idle - after.memory.idle
    assert 2 * 0.7 < saved / weights < 2 * 0.75
    assert before.ways_to_fit[in_8_bits] == after.memory
    assert in_8_bits not in {*after.ways_to_fit, *tiny.ways_to_fit}
    shards = plan(*full, "actor.fsdp=true", ranks=8)
    assert shards.memory.idle - shards.ways_to_fit[in_8_bits].idle == pytest.approx(saved / 8, rel=0.02)


def transformer_bytes():
    return sum(parameter.nbytes for parameter in load_family(ModelConfig()).transformer.parameters())


def test_a_ray_worker_that_samples_ahead_holds_the_transformer_twice():
    worker, ahead = (
        plan("rollout.placement=ray", f"rollout.max_staleness={steps}").memory for steps in (0, 1)
    )
    assert ahead.engine - worker.engine == pytest.approx(transformer_bytes(), rel=0.05)  # it has buffers, too


def test_a_quantized_base_needs_less_and_an_engine_of_its_own_none_the_less(tiny):
    quantized = plan("model.quantization=int8")
    weights = transformer_bytes()
    saved = tiny.memory.idle - quantized.memory.idle
    assert 0.6 * weights < saved < 0.75 * weights  # three quarters of the blocks' matrices, in float32
    assert quantized.memory.load == pytest.approx(tiny.memory.load - saved, rel=0.01)
    engine = ("rollout.name=vllm_omni", "rollout.dtype=float32")
    alone, beside = plan(*engine), plan(*engine, "model.quantization=int8")
    assert beside.memory.engine == pytest.approx(alone.memory.engine, rel=0.01)
    assert alone.memory.idle - beside.memory.idle == pytest.approx(saved, rel=0.01)
    sampled = [one.seconds("sample") for one in (alone, beside)]
    assert sampled[0] == pytest.approx(sampled[1])  # its engine dequantizes nothing
    assert quantized.seconds("sample", "recompute", "update") > tiny.seconds("sample", "recompute", "update")


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
    assert other_ways(load("tiny_jpeg_lora", overrides), ranks) == expected
    assert tiny.other_ways == ADAPTER_WAYS


def test_ranks_that_share_the_weights_need_less_of_each_gpu():
    full = ("model.lora.rank=0", "actor.micro_batch_size=1")
    whole = plan(*full, ranks=8).memory
    shards = plan(*full, "actor.fsdp=true", ranks=8).memory
    assert shards.idle < 0.6 * whole.idle  # the VAE and the samples stay
    assert shards.update < whole.update
    copied = plan(*full, "actor.fsdp=true", "rollout.dtype=bfloat16", ranks=8).memory
    assert copied.idle - shards.idle > 0.4 * plan("model.lora.rank=0").memory.sync / 4


@pytest.mark.slow
def test_published_recipes_get_the_answers_that_their_headers_need():
    sd35 = plan(recipe="sd35_medium_ocr_lora")
    assert sd35.fits(sd35.memory.shared)
    offloaded = sd35.ways_to_fit["model.offload_text_encoders=true"]
    assert offloaded.trainer == sd35.memory.update < 0.6 * sd35.memory.encode
    assert 7 < sd35.seconds("recompute", "update") < 13  # 9.9
    qwen = plan(recipe="qwen_image_ocr_lora_decoupled")
    assert not qwen.fits(qwen.memory.shared)
    assert "with rollout.engine.enable_sleep_mode=true rollout.engine.quantization=fp8" in qwen.answers()[2]
    assert 380 < qwen.seconds("recompute", "update") < 630  # 503
    flux = plan(recipe="flux_dev_pickscore_lora")
    assert flux.fitting
    assert flux.fits(flux.memory.shared)
    assert 580 < flux.seconds("recompute", "update") < 970  # 775
    klein = plan(recipe="flux2_klein_pickscore_lora")
    assert klein.fits(klein.memory.shared)
    z_image = plan(recipe="z_image_pickscore_lora")
    assert z_image.fits(z_image.memory.shared)
