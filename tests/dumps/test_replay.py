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
    ("changes", "named"),
    [
        ({"images": torch.zeros(6, 12, 16)}, r"images has shape \[4, 12, 16\];"),
        ({"images": torch.full((6, 3, 12, 16), 2.0)}, "images .* 0 to 1$"),
        ({"final_latents": torch.zeros(6, 4, 6, 4)}, r"final_latents .* \[4, 4, 6, 4\]; .* \[4, 4, 6, 8\]"),
        ({"rewards": torch.zeros(6, 2)}, r"rewards has shape \[4, 2\]; .* \[4\]"),
        ({"rewards": 1.0}, "rewards is one number"),
        ({"rewards": [1.0, None] * 3}, "rewards is no array"),
        ({"log_probs": [[0.0, 1.0], [2.0]] * 3}, "log_probs is no array"),
        ({"rewards": torch.zeros(12)}, "rewards .* 12 samples, .* 6;"),
        ({"prompts": []}, r"prompts=\[\] .* texts"),
        ({"prompts": "a red sign"}, "prompts='a red sign' .* texts"),
        ({"prompts": [None] * 6}, r"prompts='\(None, None, None, None\)' .* texts"),
        ({"negative_prompt": ["a", "b"]}, "negative_prompt .* 2 samples, .* 6;"),
        ({"negative_prompt": [1] * 6}, r"negative_prompt='\(1, 1, 1, 1\)' .* texts"),
        ({"log_probs": torch.zeros(6, 3)}, r"log_probs has shape \[4, 3\]; .* \[4, 2\]"),
        ({"next_latents": None}, "latents and next_latents "),
        ({"adapter_alpha": None}, "adapter and adapter_alpha "),
        ({"step_indices": None}, "2 of 4 steps, .*step_indices "),
        ({"step_indices": [2, 1]}, r"step_indices=\[2, 1\] .* ascend, .* 2 steps"),
        ({"step_indices": []}, r"step_indices=\[\] .* ascend, .* 2 steps"),
        ({"step_indices": [0.5, 1.5]}, r"step_indices=\[0\.5, 1\.5\] .* whole"),
        ({"sigmas": [1000.0, 900.0, 700.0, 400.0, 0.0]}, r"sigmas='\[1000\.0, .* timesteps by 1000"),
        ({"step_indices": [2, 4]}, r"step_indices=\[2, 4\] .* 4 steps"),
        ({"sigma_indices": [0, 1, 2, 4]}, r"sigma_indices='\[0, 1, 2, 4\]' .* 5 sigmas"),
        ({"sigma_indices": [0, 1, 2, 2, 6]}, r"sigma_indices='\[0, 1, 2, 2, 6\]' .* ascend from 0 "),
        ({"sigma_indices": [1, 2, 3, 4, 6]}, r"sigma_indices='\[1, 2, 3, 4, 6\]' .* ascend from 0 "),
        ({"sigma_indices": [0, 1, 2, 4, 10**6]}, r"sigma_indices='\[0, 1, 2, 4, 1000000\]' .* 1000,"),
        (
            {"sigma_indices": [0, 1, 2, 4, 6], "sigmas": None, "timesteps": None},
            "sigma_indices needs sigmas ",
        ),
        ({"sigmas": [0.5, 0.9, 0.7, 0.4, 0.0]}, r"sigmas='\[0\.5, 0\.9, .* descend"),
        ({"timesteps": [1000.0]}, r"timesteps .* \[1\]; .* \[4\]"),
        ({"timesteps": [1000.0, 750.0, float("nan"), 250.0]}, r"timesteps='.* nan, .* finite"),
        ({"sigmas": [float("inf"), 0.9, 0.7, 0.4, 0.0]}, r"sigmas='\[inf, .* finite"),
        ({"images": torch.full((6, 3, 12, 16), float("nan"))}, "images .* 0 to 1$"),
        *(
            ({name: torch.full_like(given()[name], float("nan"))}, f" {name} of sample 0 ")
            for name in ("initial_noise", "latents", "next_latents", "log_probs", "final_latents")
        ),
        ({"guidance_scale": float("nan")}, "guidance_scale='nan' .* number"),
        ({"sde_type": "ode"}, "sde_type='ode' .* sde or cps "),
        ({"dtype": "fp8"}, "dtype='fp8' .* float32 or bfloat16 "),
        ({"initial_noise": torch.zeros(3, *L)}, "initial_noise .* 3 samples, .* 6;"),
    ],
)
def test_samples_that_are_refused(changes, named):
    with pytest.raises(BatchError, match=named):
        samples(**changes)


@pytest.mark.parametrize(
    ("tensors", "metadata", "named"),
    [
        ({"images": None}, {}, "images is missing"),
        ({}, {"prompts": None}, "prompts is missing"),
        ({}, {"prompts": "[]"}, r"prompts='\[\]' .* texts"),
        ({}, {"prompts": "[1]"}, r"prompts='\[1\]' .* texts"),
        ({}, {"prompts": "[" * 10**5}, "prompts='None' .* texts"),
        ({}, {"images": "1"}, "images is no text"),
        ({}, {"max_sequence_length": "1e9"}, r"max_sequence_length='1000000000\.0' .* 1 to 65536"),
        ({}, {"format_version": "9"}, "format_version='9', .*'1'"),
        ({"latents": torch.zeros(4, 2, *L).to(torch.int8)}, {}, "'latents' has dtype I8"),
        ({"adapter.x": torch.zeros(2).bool()}, {}, "'adapter.x' has dtype BOOL"),
        ({"log_probs": torch.zeros(())}, {}, "log_probs is one number"),
    ],
)
def test_a_strangers_file_that_is_refused(tensors, metadata, named, tmp_path):
    path = save_replay(tmp_path, 0, samples())
    held = load_file(path) | tensors
    with safe_open(path, "pt") as file:
        said = file.metadata() | metadata
    save_file(
        {key: value for key, value in held.items() if value is not None},
        path,
        {key: value for key, value in said.items() if value is not None},
    )
    with pytest.raises(ConfigError, match=f"^{path} .*{named}"):
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
