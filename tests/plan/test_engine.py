from dataclasses import replace

import pytest

from flowcorr.config import load
from flowcorr.plan.devices import GPUS
from flowcorr.plan.engine import ADAPTED, COMPILED, engine_peak, engine_speed, wraps_adapters
from flowcorr.plan.training import NOTHING

ENGINE = "rollout.name=vllm_omni"
PEAK = GPUS["h100-80gb"].bf16


def speed_of(*overrides):
    return engine_speed(load("tiny_jpeg_lora", overrides))


@pytest.mark.parametrize(
    ("overrides", "speed"),
    [
        ((), None),  # samples in process, eagerly
        ((ENGINE,), ADAPTED),
        ((ENGINE, "rollout.engine.weight_sync=merged"), COMPILED),
        ((ENGINE, "model.lora.rank=0"), COMPILED),
        ((ENGINE, "rollout.engine.enforce_eager=true"), None),
    ],
)
def test_a_recipes_engine_has_the_speed_of_its_kind(overrides, speed):
    assert speed_of(*overrides) is speed


def test_many_rows_are_limited_by_arithmetic_and_one_by_the_host():
    work = replace(NOTHING, flops=38e12, kernels=10_000)
    batch = replace(work, flops=32 * work.flops)
    assert ADAPTED.seconds(batch, PEAK) == pytest.approx(batch.flops / (PEAK * ADAPTED.share))
    assert ADAPTED.seconds(work, PEAK) == pytest.approx(10_000 * ADAPTED.launch)


def test_the_share_lies_in_its_band_and_adapters_cost():
    for speed in (COMPILED, ADAPTED):
        assert speed.slowest < speed.share < speed.fastest
    assert ADAPTED.share < COMPILED.share


def test_the_peak_is_that_of_the_engines_dtype():
    gpu = GPUS["h100-80gb"]
    config = load("tiny_jpeg_lora", [ENGINE])
    assert engine_peak(config, gpu) == gpu.float32
    assert engine_peak(load("tiny_jpeg_lora", [ENGINE, "rollout.dtype=bfloat16"]), gpu) == gpu.bf16
    assert wraps_adapters(config)
