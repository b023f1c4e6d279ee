import copy
from dataclasses import replace

import pytest
import torch
from instruments.doctor.faults import (
    assert_named,
    check,
    finding_of,
    rounded_after_scoring,
    separate,
    shifted,
)

from tests.overflow import overflow, overflow_one
from tests.planted.mistakes import first_repeated, spoiled
from tests.planted.plants import returning, rounded, sampling_with, scheduled

RETURNED = {
    "values that are not finite": ("finite", {"latents": spoiled}, {}),
    "one step counted from one": (
        "window",
        {"step_indices": lambda rollout: rollout.window.step_indices + torch.tensor([0, 1])},
        {"step_index": 2, "sigma_of": 1},
    ),
    "latents rounded to bfloat16": (
        "latent_dtype",
        {"latents": lambda rollout: rounded(rollout.window.latents)},
        {},
    ),
    "next latents rounded after they were scored": (
        "latent_dtype",
        {"next_latents": rounded_after_scoring},
        {},
    ),
}
SAMPLED = {
    "another shift": ("schedule", scheduled(shifted), {}, {}),
    "one step fewer": (
        "schedule",
        scheduled(lambda engine: engine.family.schedule(2, engine.plan.latent_shape)),
        {},
        {},
    ),
    "sigmas rounded to bfloat16": (
        "schedule",
        scheduled(
            lambda engine: replace(
                engine.plan.schedule,
                sigmas=tuple(rounded(torch.tensor(engine.plan.schedule.sigmas)).tolist()),
            )
        ),
        {},
        {"dtype": "bfloat16"},
    ),
    "a window for each image": (
        "window",
        sampling_with(window_per="sample"),
        {"rollout": {"n": 6}, "sampling": {"sde_window_size": 1}},
        {},
    ),
    "consecutive windows where scattered ones are asked for": (
        "window",
        sampling_with(sde_window_layout="consecutive"),
        {
            "sampling": {
                "num_inference_steps": 8,
                "sde_window_range": (0, 7),
                "sde_window_layout": "scattered",
            }
        },
        {"samples_off": 4},
    ),
    "another noise level": ("transition", sampling_with(noise_level=0.8), {}, {}),
    "another sde type": ("transition", sampling_with(sde_type="dance_sde"), {}, {}),
}


@pytest.mark.parametrize("fault", RETURNED)
def test_returned_values(recorded, fault):
    name, changes, numbers = RETURNED[fault]
    returning(**changes)(recorded.engine)
    assert_named(check(recorded, recorded.engine), name, **numbers)


@pytest.mark.parametrize("layer", ["conv_in", "conv_out"])
def test_a_decoder_that_overflows(small_run, layer):
    run = small_run()
    engine = separate(run)
    engine.family.pipeline.vae = copy.deepcopy(engine.family.pipeline.vae)
    overflow(engine.family.pipeline.vae, layer)
    report = check(run, engine)
    assert_named(report, "finite", images=4, not_finite=4, first_sample=0)
    assert "model.dtype=float32" in finding_of(report, "finite").remedy


def test_a_decoder_that_overflows_in_half_precision_alone(small_run):
    """In float32 nothing is wrong; the report is that of the run's own precision."""
    run = small_run(
        model={"dtype": "float16"},
        rollout={"dtype": "float16", "n": 2},
        sampling={"height": 16, "width": 32},  # float16 is slow on a CPU
    )
    final = run.engine.sample(run.conditioning, range(2), training_step=0, with_means=False).final_latents
    run.family.pipeline.vae = copy.deepcopy(run.family.pipeline.vae)  # runs share it
    overflow_one(run.family, final)
    report = check(run, run.engine)
    assert report.causes() == ["finite"]
    assert finding_of(report, "float32").level == "healthy"
    assert "model.dtype=float16" in finding_of(report, "finite").remedy


def test_final_latents_that_are_not_finite(recorded):
    def lost(rollout):
        final = rollout.final_latents.clone()
        final[1, 0, 0, 0] = torch.inf
        return final

    returning(final_latents=lost)(recorded.engine)
    assert_named(check(recorded, recorded.engine), "finite", side="engine")


@pytest.mark.parametrize("fault", SAMPLED)
def test_sampling(small_run, fault):
    name, plant, sections, numbers = SAMPLED[fault]
    run = small_run(**sections)
    engine = separate(run)
    plant(engine)
    assert_named(check(run, engine), name, **numbers)


@pytest.mark.parametrize("same_initial_noise", [True, False])
def test_a_sample_that_is_returned_twice(same_initial_noise, small_run):
    run = small_run(rollout={"same_initial_noise": same_initial_noise})
    engine = separate(run)
    first_repeated(engine)
    assert_named(check(run, engine, float32=False), "samples", sample=3, has_trajectory_of=0)
