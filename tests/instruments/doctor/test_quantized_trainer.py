"""A trainer whose weights are quantized, beside an engine whose are not: no fault, and faults above it are found."""

import pytest
from instruments.doctor.faults import (
    GUIDED,
    another_checkpoint,
    another_guidance,
    assert_named,
    check,
    finding_of,
    shifted,
)

from flowcorr.config import load
from flowcorr.health.rules import units_of
from flowcorr.instruments.doctor import examine, precision
from flowcorr.rollout.precision import trainer_quantization, usual_gap
from tests.judging import examine_step
from tests.planted.plants import merging, own_engine, scheduled

INT8 = pytest.param("int8", id="int8")
NF4 = pytest.param("nf4", id="nf4", marks=pytest.mark.quantized)
BOTH = pytest.mark.parametrize("quantization", [INT8, NF4])
OMNI = {"name": "vllm_omni"}  # an engine with a model of its own, for which one in process stands


@pytest.fixture
def beside(small_run):
    """A run with quantized weights, and an engine on the unquantized base with its adapter."""

    def make(quantization, **sampling):
        run = small_run(model={"quantization": quantization}, rollout=OMNI, sampling=sampling)
        return run, own_engine(small_run(sampling=sampling).actor, run.config)

    return make


@BOTH
def test_quantization_is_named_with_its_size_and_is_no_fault(beside, quantization):
    run, engine = beside(quantization)
    report = check(run, engine, float32=False)
    assert report.causes() == []
    finding = finding_of(report, "weights")
    assert finding.level == "healthy"
    assert finding.numbers["model.quantization"] == quantization
    assert finding.numbers["limit"] == usual_gap(run.config)
    assert finding.numbers["value"] > {"int8": 2e-3, "nf4": 0.03}[quantization]


FAULTS = {
    "weights": ({}, merging(another_checkpoint)),
    "guidance": (GUIDED, another_guidance(guidance_scale=1.0)),
    "schedule": ({}, scheduled(shifted)),
}


@BOTH
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_above_the_quantization_is_named(beside, quantization, name):
    sampling, plant = FAULTS[name]
    run, engine = beside(quantization, **sampling)
    plant(engine)
    assert_named(check(run, engine, float32=False), name)


@BOTH
def test_an_adapter_that_never_arrives_is_named(beside, quantization):
    run, engine = beside(quantization)
    engine.sync(run.actor.weights.snapshot())
    start = {
        name: value * (".lora_B." not in name) for name, value in run.actor.weights.snapshot().tensors.items()
    }
    merge = engine.merge
    engine.merge = lambda tensors: merge(start)
    report = examine(run.actor, engine, run.conditioning, float32=False)
    assert "lora" in report.causes()


@BOTH
def test_an_engine_that_shares_the_quantized_weights_has_no_gap(small_run, quantization):
    run = small_run(model={"quantization": quantization})
    report = check(run, run.engine)
    assert report.causes() == []
    assert "model.quantization" not in finding_of(report, "weights").numbers


def test_float32_examines_both_stacks_unquantized_where_one_is(make_config):
    apart = make_config(model={"quantization": "nf4"}, rollout=OMNI)
    assert trainer_quantization(apart) == "nf4"
    assert precision.float32_config(apart).model.quantization == "none"
    shared = make_config(model={"quantization": "nf4"})
    assert precision.float32_config(shared) == shared


def test_replays_and_health_rules_know_the_gap():
    config = load(
        "tiny_ocr_lora", ["rollout.name=vllm_omni", "rollout.emulate=none", "model.quantization=nf4"]
    )
    usual = usual_gap(config)
    units = units_of(config, {})
    for gap, rules in ((0.9 * usual, []), (1.1 * usual, ["replay_window"])):
        assert [
            finding.cause for finding in examine_step({"rollout_corr/replay/window": gap}, units)
        ] == rules
