from dataclasses import replace

import pytest
from instruments.doctor.faults import (
    GUIDED,
    SHORT,
    SMALL,
    WHOLE,
    another_guidance,
    assert_named,
    check,
    finding_of,
    separate,
)

from flowcorr.instruments.doctor import examine
from tests.planted.mistakes import negative_of_another, no_negative, sides_exchanged
from tests.planted.plants import conditioned, rescaled_guidance, seeing
from tests.prompts import prompts_of

FAULTS = {
    "none": (another_guidance(guidance_scale=1.0), {}, {"value": 1.0, "limit": 4.0}),
    "more": (another_guidance(guidance_scale=5.0), {}, {"value": 5.0, "limit": 4.0}),
    "none, fp8": (another_guidance(guidance_scale=1.0), {"rollout": {"emulate": "fp8"}}, {"limit": 4.0}),
    "seven tenths, bfloat16": (
        another_guidance(guidance_scale=2.8),
        {"model": WHOLE, "rollout": {"dtype": "bfloat16"}},
        {"value": 2.8},
    ),
    "rescaled": (rescaled_guidance(0.7), {}, {"guidance_rescale": 0.7}),
    "rescaled, bfloat16": (
        rescaled_guidance(0.7),
        {"rollout": {"dtype": "bfloat16"}},
        {"guidance_rescale": 0.7},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_guidance(small_run, fault):
    plant, sections, numbers = FAULTS[fault]
    run = small_run(sampling=GUIDED, **sections)
    engine = separate(run)
    plant(engine)
    report = check(run, engine, float32=False)
    assert_named(report, "guidance")
    found = finding_of(report, "guidance").numbers
    assert {name: found[name] for name in numbers} == pytest.approx(numbers, rel=0.01)


def empty(engine, conditioning):
    """The embeddings of an empty negative prompt, which the doctor does not have."""
    guidance = replace(engine.plan.guidance, guidance_scale=4.0, negative_prompt="")
    encoded = engine.family.encode(prompts_of(["cat"]), guidance)
    return {
        name: encoded[name][:1].expand_as(rows) if name.startswith("negative_") else rows
        for name, rows in conditioning.items()
    }


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        (negative_of_another, "another's negative"),
        (sides_exchanged, "exchanged"),
        (no_negative, "zeros"),
        (empty, "unknown"),
    ],
)
def test_another_negative_prompt(change, fits, small_run):
    run = small_run(sampling={**GUIDED, "negative_prompt": "far"})
    engine = separate(run)
    conditioned(change, told=False)(engine)
    plan = engine.plan
    assert_named(check(run, engine, float32=False), "guidance", fits=fits)
    assert engine.plan is plan


@pytest.mark.parametrize("rollout", [{}, {"dtype": "bfloat16"}, {"emulate": "fp8"}])
def test_another_family(tmp_path, make_config, rollout):
    import tiny_pipelines

    height, width = tiny_pipelines.QWEN_SIZE
    config = make_config(
        model={"path": str(tiny_pipelines.build_tiny_qwen_image(tmp_path)), "max_sequence_length": 16},
        sampling={**SHORT, "height": height, "width": width, "true_cfg_scale": 4.0},
        rollout={**SMALL, **rollout},
    )
    _, actor, engine, conditioning = tiny_pipelines.connect(config, ["cat", "dog"])
    tiny_pipelines.stir(actor)
    engine.sync(actor.weights.snapshot())
    assert examine(actor, engine, conditioning, float32=False).causes() == []
    another_guidance(true_cfg_scale=1.0)(engine)
    assert examine(actor, engine, conditioning, float32=False).causes() == ["guidance"]


@pytest.mark.parametrize("rollout", [{}, {"dtype": "bfloat16"}, {"emulate": "fp8"}])
def test_distilled_guidance(tmp_path, make_config, rollout):
    import tiny_pipelines

    height, width = tiny_pipelines.FLUX_SIZE
    config = make_config(
        model={"path": str(tiny_pipelines.build_tiny_flux(tmp_path)), "max_sequence_length": 16},
        sampling={**SHORT, "height": height, "width": width, "guidance_scale": 3.5},
        rollout={**SMALL, **rollout},
    )
    _, actor, engine, conditioning = tiny_pipelines.connect(config, ["cat", "dog"])
    tiny_pipelines.stir(actor)
    engine.sync(actor.weights.snapshot())
    assert examine(actor, engine, conditioning, float32=False).causes() == []
    another_guidance(guidance_scale=1.0)(engine)
    report = examine(actor, engine, conditioning, float32=False)
    assert report.causes() == ["guidance"]
    assert finding_of(report, "guidance").numbers == {"value": 1.0, "limit": 3.5}


@pytest.mark.parametrize("factor", [0.95, 1.05, 1.2])
def test_velocities_too_long_are_no_guidance(factor, small_run):
    """Rescaling of guidance would explain most of it, by a factor below 0 or near it."""
    run = small_run(sampling=GUIDED)
    engine = separate(run)
    seeing(lambda velocity, *arguments: factor * velocity(*arguments))(engine)
    report = check(run, engine)
    assert_named(report, "weights")
    assert finding_of(report, "weights").numbers["velocity_factor"] == pytest.approx(factor, rel=1e-4)
