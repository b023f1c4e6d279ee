import pytest
import torch
from instruments.doctor.faults import (
    GUIDED,
    WHOLE,
    assert_named,
    check,
    coarse,
    finding_of,
    no_vae_scaling,
    separate,
    vae_scaling_off,
)

from flowcorr.errors import BackendError
from flowcorr.instruments.doctor import examine, precision
from flowcorr.rollout import InProcessEngine
from tests.planted.mistakes import head_missing
from tests.planted.plants import feeding, merging, rescaled_guidance

pytestmark = pytest.mark.system

FAULTS = {
    "an attention head lost": ("weights", merging(head_missing), GUIDED),
    "timesteps truncated": (
        "timesteps",
        feeding(torch.trunc),
        {"num_inference_steps": 7, "sde_window_range": (1, 3)},
    ),
    "no VAE scaling": ("images", no_vae_scaling, GUIDED),
    "VAE scaling off": ("images", vae_scaling_off(1.25), GUIDED),
    "guidance rescaled": ("guidance", rescaled_guidance(0.7), GUIDED),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_float32_shows_a_fault_that_bfloat16_hides(small_run, fault):
    name, plant, sampling = FAULTS[fault]
    run = small_run(rollout={"dtype": "bfloat16"}, sampling=sampling)
    engine = separate(run)
    plant(engine)
    assert_named(check(run, engine), name, dtype="float32")


def test_a_report_without_float32_says_which_gap_it_would_miss(small_run):
    run = small_run(rollout={"dtype": "bfloat16"}, sampling=GUIDED)
    engine = separate(run)
    merging(head_missing)(engine)
    report = check(run, engine, float32=False)
    assert report.causes() == ["path"]  # what all samples have in common stands out of rounding
    assert finding_of(report, "float32").numbers["limit"] == pytest.approx(0.46, abs=5e-3)


def test_a_healthy_engine_agrees_in_float32(small_run):
    run = small_run(model={"dtype": "bfloat16"}, rollout={"dtype": "bfloat16", "staleness": 1})
    before = {name: value.clone() for name, value in run.family.transformer.state_dict().items()}
    sampled = run.sample()
    report = examine(run.actor, run.engine, run.conditioning)
    assert report.causes() == []
    assert finding_of(report, "float32").level == "healthy"
    after = run.family.transformer.state_dict()
    assert all(value.dtype == after[name].dtype for name, value in before.items())
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert run.actor.config is run.config
    assert torch.equal(run.sample().window.latents, sampled.window.latents)


def test_remarks_of_float32_are_passed_on(small_run):
    run = small_run(model=WHOLE, rollout={"dtype": "bfloat16"})
    engine = separate(run)
    merging(coarse)(engine)
    report = check(run, engine)
    assert report.causes("warning") == ["float32"]
    assert finding_of(report, "float32").numbers["checks"] == ["weights"]


def test_memory_decides_by_default(small_run, monkeypatch):
    run = small_run(rollout={"dtype": "bfloat16"})
    monkeypatch.setattr(precision, "free_memory", lambda device: 1e6)
    report = check(run, run.engine)
    assert finding_of(report, "float32").level == "note"
    assert finding_of(check(run, run.engine, float32=True), "float32").level == "healthy"


def test_an_engine_of_one_precision_is_not_examined_in_float32(small_run):
    class Fixed(InProcessEngine):
        in_float32 = None

    run = small_run(rollout={"dtype": "bfloat16"})
    engine = separate(run)
    engine.__class__ = Fixed
    report = check(run, engine, float32=True)
    assert report.causes() == []
    assert finding_of(report, "float32").level == "note"


def test_both_in_float32_comes_back_after_an_error(small_run):
    run = small_run(model={"dtype": "bfloat16"}, rollout={"emulate": "int8"})

    def fail_in_float32():
        with precision.actor_in_float32(run.actor), run.engine.in_float32():
            assert run.actor.config.rollout.emulate == run.engine.config.emulate == "none"
            assert next(run.family.transformer.parameters()).dtype == torch.float32
            raise BackendError("died")

    with pytest.raises(BackendError, match="^died$"):
        fail_in_float32()
    assert run.engine.config.emulate == "int8"
    assert run.family.transformer.pos_embed.proj.weight.dtype == torch.bfloat16
