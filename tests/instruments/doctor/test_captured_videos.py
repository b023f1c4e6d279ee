"""Captured videos of Wan: a clean step is clean, and a fault of theirs is named."""

import pytest
import torch
from tiny_pipelines import PIPELINES, connect, overrides

import flowcorr
from flowcorr.config import load
from flowcorr.instruments.doctor import examine_dump

PROMPTS = ("a cat", "a dog", "the sun")
NUM_STEPS, WINDOW = 6, 3


@pytest.fixture(scope="module", params=["wan", "wan22_ti2v"])
def model(request, tmp_path_factory):
    """The folder of a tiny Wan, and the fields of `ReplaySamples` of a step that it sampled."""
    tiny = PIPELINES[request.param]
    path = tiny.build(tmp_path_factory.mktemp("wan") / "model")
    steps = {"num_inference_steps": NUM_STEPS, "sde_window_size": WINDOW, "sde_window_range": [0, WINDOW]}
    keys = [*overrides(path, tiny.size, "float32", tiny.frames), "rollout.n=2", "rollout.name=in_process"]
    keys += ["rollout.engine={}", *(f"sampling.{key}={value}" for key, value in steps.items())]
    config = load("wan_ocr_lora", keys)
    family, _, engine, conditioning = connect(config, PROMPTS)
    rollout = engine.sample(conditioning, range(len(PROMPTS)), training_step=1, with_means=False)
    schedule = family.schedule(NUM_STEPS, tuple(rollout.final_latents.shape[1:]))
    window = rollout.window
    return path, {
        "prompts": [prompt for prompt in PROMPTS for _ in range(2)],
        "initial_noise": window.latents[:, 0],
        "images": rollout.images,
        "negative_prompt": "",
        "guidance_scale": config.sampling.guidance_scale,
        "max_sequence_length": config.model.max_sequence_length,
        "sigmas": schedule.sigmas,
        "timesteps": schedule.timesteps,
        "noise_level": config.sampling.noise_level,
        "sde_type": config.sampling.sde_type,
        "latents": window.latents,
        "next_latents": window.next_latents,
        "log_probs": rollout.log_probs,
        "step_indices": range(WINDOW),
        "final_latents": rollout.final_latents,
        "dtype": "float32",
    }


def examined(folder, model, **changes):
    path, fields = model
    steps = torch.zeros(len(fields["prompts"]), WINDOW)
    replay = flowcorr.ReplaySamples(**fields | changes)
    flowcorr.dump(
        folder, 0, rollout_log_probs=steps, old_log_probs=steps, advantages=steps[:, 0], replay=replay
    )
    return examine_dump(folder, str(path))


def test_clean_videos_are_clean(model, tmp_path):
    report = examined(tmp_path, model)
    assert report.causes() == report.causes("warning") == []
    levels = {finding.cause: finding.level for finding in report.findings}
    assert {levels[check] for check in ("schedule", "log_probs", "noise", "guidance", "images")} == {
        "healthy"
    }


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("swapped_images", lambda videos: videos.roll(2, 0)),
        ("channels_reversed", lambda videos: videos.flip(-1)),
    ],
)
def test_a_fault_of_videos_is_named(cause, change, model, tmp_path):
    assert set(examined(tmp_path, model, images=change(model[1]["images"])).causes()) == {cause}


@pytest.mark.parametrize(
    ("change", "held"),
    [
        (lambda videos: videos.flip(1), "8, 7, 6, 5, 4, 3, 2, 1, 0"),
        (lambda videos: videos[:, :5], "0, 1, 2, 3, 4"),
        (lambda videos: videos[:, ::2], "0, 2, 4, 6, 8"),
    ],
)
def test_frames_that_are_not_the_whole_video_in_order_are_named(change, held, model, tmp_path):
    report = examined(tmp_path, model, images=change(model[1]["images"]))
    assert {*report.causes()} == {"frames"}
    assert held in report.findings[0].sentence
