"""The file with a few samples of a step: what it holds, what is refused, and what may be left out."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from dumps.replay_samples import L, given, samples
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import flowcorr
from flowcorr import dumps
from flowcorr.dumps.replay import COSTS, COUNT, load_replay, replay_files, save_replay
from flowcorr.errors import BatchError, ConfigError


def test_a_file_holds_all_of_it(tmp_path):
    made = samples()
    path = save_replay(tmp_path, 7, made)
    assert replay_files(tmp_path) == {7: path}
    found = load_replay(path)
    assert found.prompts == tuple(f"a cat number {index}" for index in range(COUNT))
    assert made.tensors().keys() == found.tensors().keys()
    for name, value in made.tensors().items():
        assert torch.equal(value, found.tensors()[name]), name
        assert name in ("sigmas", "timesteps", "step_indices", "sigma_indices") or len(value) == COUNT
    (name,) = found.adapter
    assert torch.equal(found.adapter[name], made.adapter[name])
    plain = ("negative_prompt", "guidance_scale", "noise_level", "sde_type", "adapter_alpha", "dtype")
    assert all(getattr(found, field) == getattr(made, field) for field in plain)
    assert found.max_sequence_length == 128
    assert found.missing() == []
    assert path.stat().st_size < 2**17


def test_dump_writes_it_beside_the_step_which_others_read_as_before(tmp_path):
    terms = {"rollout_log_probs": torch.zeros(2, 2), "advantages": [1.0, -1.0]}
    path = flowcorr.dump(tmp_path, 3, **terms, replay=samples())
    assert dumps.files(tmp_path) == {3: path}
    assert list(replay_files(tmp_path)) == [3]


def test_each_sample_may_have_a_negative_prompt_of_its_own(tmp_path):
    made = samples(negative_prompt=[f"blur {index}" for index in range(6)])
    expected = tuple(f"blur {index}" for index in range(COUNT))
    assert made.negative_prompt == load_replay(save_replay(tmp_path, 0, made)).negative_prompt == expected
    with pytest.raises(BatchError, match="negative_prompt is of 2 samples, and prompts of 6"):
        samples(negative_prompt=["a", "b"])
    with pytest.raises(BatchError, match="negative_prompt=.* must be a text, or texts, one a sample"):
        samples(negative_prompt=[1] * 6)


@pytest.mark.parametrize("kind", [np.float64, np.float32, torch.tensor])
def test_numbers_may_be_of_any_library(kind):
    made = samples(guidance_scale=kind(4.5), noise_level=kind(0.5), max_sequence_length=np.int64(7))
    assert (made.guidance_scale, made.noise_level, made.max_sequence_length) == (4.5, 0.5, 7)


def test_it_is_a_copy():
    """Later updates change the adapter, and the next batch the latents."""
    fields = given()
    made = flowcorr.ReplaySamples(**fields)
    noise, weight = made.initial_noise.clone(), made.adapter["blocks.0.to_q.lora_A.weight"].clone()
    fields["initial_noise"].zero_()
    fields["adapter"]["blocks.0.to_q.lora_A.weight"].zero_()
    assert torch.equal(made.initial_noise, noise)
    assert torch.equal(made.adapter["blocks.0.to_q.lora_A.weight"], weight)


@pytest.mark.parametrize("layout", ["channels first", "channels last", "bytes"])
def test_images_in_any_layout(layout):
    images = given()["images"]
    expected = (images[:COUNT].permute(0, 2, 3, 1) * 255).round().to(torch.uint8)
    if layout != "channels first":
        images = images.permute(0, 2, 3, 1)
    if layout == "bytes":
        images = (images * 255).round().to(torch.uint8).numpy()
    assert torch.equal(samples(images=images).images, expected)


def test_videos_in_any_layout():
    videos = torch.rand(6, 5, 3, 12, 16)
    expected = (videos[:COUNT].movedim(2, -1) * 255).round().to(torch.uint8)
    for layout in (videos, videos.movedim(2, -1)):
        assert torch.equal(samples(images=layout).images, expected)


def test_every_field_but_prompt_noise_and_image_may_be_left_out(tmp_path):
    fields = given()
    needed = {name: fields[name] for name in ("prompts", "initial_noise", "images")}
    bare = flowcorr.ReplaySamples(**needed)
    found = load_replay(save_replay(tmp_path, 0, bare))
    assert [line.removeprefix("not captured: ").split(";")[0] for line in found.missing()] == list(COSTS)
    for name in needed:
        with pytest.raises(TypeError, match=name):
            flowcorr.ReplaySamples(**{key: value for key, value in needed.items() if key != name})


def test_all_steps_are_the_window_where_no_place_is_given():
    draw = torch.randn(6, 4, *L)
    made = samples(latents=draw, next_latents=draw, log_probs=torch.zeros(6, 4), step_indices=None)
    assert made.step_indices is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": torch.zeros(6, 12, 16)}, r"images has shape \[4, 12, 16\]"),
        ({"images": torch.full((6, 3, 12, 16), 2.0)}, "floats from 0 to 1"),
        (
            {"final_latents": torch.zeros(6, 4, 6, 4)},
            r"final_latents has shape \[4, 4, 6, 4\]; it must be \[4, 4, 6, 8\]",
        ),
        ({"rewards": torch.zeros(6, 2)}, "rewards has shape"),
        ({"rewards": 1.0}, "rewards is one number"),
        ({"rewards": [1.0, None] * 3}, "rewards is no array of numbers"),
        ({"log_probs": [[0.0, 1.0], [2.0]] * 3}, "log_probs is no array of numbers"),
        ({"rewards": torch.zeros(12)}, "rewards is of 12 samples, and prompts of 6"),
        ({"prompts": []}, r"prompts=\[\] must be texts, one a sample"),
        ({"prompts": "a red sign"}, "prompts='a red sign' must be texts, one a sample"),
        ({"prompts": [None] * 6}, "must be texts, one a sample"),
        ({"log_probs": torch.zeros(6, 3)}, "log_probs has shape"),
        ({"next_latents": None}, "latents and next_latents belong together"),
        ({"adapter_alpha": None}, "adapter and adapter_alpha"),
        ({"step_indices": None}, "the window has 2 of 4 steps, so step_indices is needed"),
        ({"step_indices": [2, 1]}, "must ascend"),
        ({"step_indices": []}, "must ascend"),
        ({"step_indices": [0.5, 1.5]}, r"step_indices=\[0\.5, 1\.5\] must be whole numbers"),
        ({"sigmas": [1000.0, 900.0, 700.0, 400.0, 0.0]}, "must lie from 0 to 1; divide timesteps by 1000"),
        ({"step_indices": [2, 4]}, "must lie in a schedule of 4 steps"),
        (
            {"sigma_indices": [0, 1, 2, 4]},
            r"sigma_indices=.* must ascend from 0 .*, one place for each of 5 sigmas",
        ),
        ({"sigma_indices": [0, 1, 2, 2, 6]}, "must ascend from 0"),
        ({"sigma_indices": [1, 2, 3, 4, 6]}, "must ascend from 0"),
        ({"sigma_indices": [0, 1, 2, 4, 10**6]}, "at most"),
        ({"sigma_indices": [0, 1, 2, 4, 6], "sigmas": None, "timesteps": None}, "needs sigmas or timesteps"),
        ({"sigmas": [0.5, 0.9, 0.7, 0.4, 0.0]}, "must descend"),
        ({"timesteps": [1000.0]}, r"with 5 sigmas it must be \[4\]"),
        ({"timesteps": [1000.0, 750.0, float("nan"), 250.0]}, "must be finite"),
        ({"sigmas": [float("inf"), 0.9, 0.7, 0.4, 0.0]}, "must be finite"),
        ({"images": torch.full((6, 3, 12, 16), float("nan"))}, "floats from 0 to 1"),
        *(
            ({name: torch.full_like(given()[name], float("nan"))}, f"{name} of sample 0 is not finite")
            for name in ("initial_noise", "latents", "next_latents", "log_probs", "final_latents")
        ),
        ({"guidance_scale": float("nan")}, "guidance_scale='nan' must be a number"),
        ({"sde_type": "ode"}, "sde_type='ode' must be sde or cps"),
        ({"dtype": "fp8"}, "must be float32 or bfloat16 or float16"),
        ({"initial_noise": torch.zeros(3, *L)}, "initial_noise is of 3 samples, and prompts of 6"),
    ],
)
def test_samples_that_are_refused(changes, message):
    with pytest.raises(BatchError, match=message):
        samples(**changes)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"images": None}, {}, "images is missing"),
        ({}, {"prompts": None}, "prompts is missing"),
        ({}, {"prompts": "[]"}, "prompts='\\[\\]' must be texts, one a sample"),
        ({}, {"prompts": "[1]"}, "prompts='\\[1\\]' must be texts"),
        ({}, {"prompts": "[" * 10**5}, "prompts='None' must be texts"),
        ({}, {"images": "1"}, "images is no text of its metadata"),
        ({}, {"max_sequence_length": "1e9"}, "must be a whole number from 1 to 65536"),
        ({}, {"format_version": "9"}, "has format_version='9'"),
        ({"latents": torch.zeros(4, 2, *L).to(torch.int8)}, {}, "'latents' has dtype I8"),
        ({"adapter.x": torch.zeros(2).bool()}, {}, "'adapter.x' has dtype BOOL"),
        ({"log_probs": torch.zeros(())}, {}, "log_probs is one number"),
    ],
)
def test_a_strangers_file_that_is_refused(tensors, metadata, message, tmp_path):
    path = save_replay(tmp_path, 0, samples())
    held = load_file(path) | tensors
    with safe_open(path, "pt") as file:
        said = file.metadata() | metadata
    save_file(
        {key: value for key, value in held.items() if value is not None},
        path,
        {key: value for key, value in said.items() if value is not None},
    )
    with pytest.raises(ConfigError, match=message):
        load_replay(path)


def test_reading_imports_no_model_library(tmp_path):
    path = save_replay(tmp_path, 0, samples())
    code = (
        "import sys; from pathlib import Path; from flowcorr.dumps.replay import load_replay\n"
        f"load_replay(Path({str(path)!r}))\n"
        "print(sorted({'diffusers', 'transformers', 'peft', 'accelerate'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
