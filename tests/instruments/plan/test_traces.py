"""One trace serves every GPU."""

from flowcorr.config import load
from flowcorr.instruments.plan.architecture import find_architecture
from flowcorr.instruments.plan.devices import GPUS
from flowcorr.instruments.plan.estimate import plan_of
from flowcorr.instruments.plan.traces import engine_pass, trace

RECIPE = "tiny_jpeg_lora"


def test_another_gpu_needs_no_other_trace(traces):
    fast, slow = (plan_of(traces, load(RECIPE), gpu=GPUS[name]) for name in ("h100-80gb", "l40s-48gb"))
    assert fast.memory == slow.memory
    assert [phase.flops for phase in fast.phases] == [phase.flops for phase in slow.phases]


def test_an_engines_layers_for_adapters_launch_more_than_the_trainers():
    config, architecture = load(RECIPE), find_architecture("tiny_ocr")
    own, beside, merged = (
        engine_pass(config, architecture, layers).work for layers in ("own", "beside", "merged")
    )
    assert beside.flops == own.flops > merged.flops
    assert beside.kernels > own.kernels > merged.kernels
    assert beside.peak >= own.peak


def test_a_run_is_traced_with_the_layers_of_its_engine():
    beside, merged = (
        trace(load(RECIPE, ["rollout.name=vllm_omni", *sync])).sampling
        for sync in ([], ["rollout.engine.weight_sync=merged"])
    )
    assert beside.kernels > merged.kernels
