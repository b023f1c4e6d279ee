"""One trace serves every GPU and every layout."""

import pytest

from flowcorr.config import load
from flowcorr.plan.devices import GPUS
from flowcorr.plan.estimate import make_plan, plan_of

# The fake device has to be registered before a process computes its first gradient.
pytestmark = pytest.mark.fake_device

RECIPE = "tiny_jpeg_lora"


def test_a_trace_gives_the_plan_of_a_layout_that_was_not_traced(traces):
    config = load(RECIPE, ["rollout.placement=ray", "rollout.num_workers=2"])
    gpu = GPUS["l40s-48gb"]
    traced, planned = plan_of(traces, config, gpu=gpu, ranks=2), make_plan(config, gpu=gpu, ranks=2)
    # The trace has micro-batches of twice the size, and so fewer launches.
    assert traced.seconds() == pytest.approx(planned.seconds(), rel=0.1)
    assert traced.images == planned.images == 48


def test_another_gpu_needs_no_other_trace(traces):
    fast, slow = (plan_of(traces, load(RECIPE), gpu=GPUS[name]) for name in ("h100-80gb", "l40s-48gb"))
    assert fast.memory == slow.memory
    assert [phase.flops for phase in fast.phases] == [phase.flops for phase in slow.phases]


def test_an_engine_that_merges_the_adapter_computes_less(traces):
    assert traces.plain_pass.flops < traces.wrapped_pass.flops
    assert traces.plain_pass.kernels < traces.wrapped_pass.kernels


def test_an_engines_layers_for_adapters_launch_more_than_the_trainers(traces):
    assert traces.wrapped_pass.flops == traces.adapted_pass.flops
    assert traces.wrapped_pass.kernels > traces.adapted_pass.kernels > traces.plain_pass.kernels
    assert traces.wrapped_pass.peak >= traces.adapted_pass.peak
