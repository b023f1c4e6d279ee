"""Checks of a recipe that need no model."""

import shutil

import pytest
from tiny_pipelines import FAMILIES

from flowcorr.config import load
from flowcorr.config.schema import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.architecture import find_architecture, local_architecture
from flowcorr.instruments.plan.preflight import check_prompts, check_settings, size_limits
from flowcorr.models import EMBEDDED, load_family


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_are_those_that_the_loaded_model_takes(name, tmp_path):
    path = str(FAMILIES[name].build(tmp_path))
    multiple, largest = size_limits(find_architecture(path))
    family = load_family(ModelConfig(path=path), text_encoders=False)
    family.latent_shape(2 * multiple, multiple)
    assert (largest is not None) == (name == "sd3")
    refused = {multiple - 1: f" multiple of {multiple},"}
    if largest is not None:
        refused[largest + multiple] = f" at most {largest}$"
    for height, allowed in refused.items():
        with pytest.raises(ConfigError, match=rf"sampling\.height={height} .*{allowed}"):
            family.latent_shape(height, multiple)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.trackers=[wandbb]", r"^trainer\.trackers='wandbb' .* wandb\?"),
        ("trainer.device=cudda", r"^trainer\.device='cudda' "),
        ("sampling.height=17", r"^sampling\.height=17 .* multiple of 8,"),
        ("trainer.eval_width=17", r"^trainer\.eval_width=17 .* multiple of 8,"),
        ("model.family=sd4", r"^model\.family='sd4' .* sd3\?"),
        ("reward.terms=[{name: ocrr}]", r"^reward\.terms\.name='ocrr' .* ocr\?"),
        ("reward.gold=[{name: ocr, options: {speed: 1}}]", "^reward ocr .*'speed'"),
    ],
)
def test_settings_that_no_machine_can_use(override, named):
    with pytest.raises(ConfigError, match=named):
        check_settings(load("tiny_jpeg_lora", [override]))


def test_what_only_another_machine_knows_is_not_asked_for():
    check_settings(load("tiny_jpeg_lora", ["trainer.device=cuda:7"]))
    check_settings(load("tiny_jpeg_lora", ["model.path=nobody/nothing", "sampling.height=17"]))
    check_settings(load("tiny_jpeg_lora", ["model.path=" + "n" * 5000, "sampling.height=17"]))
    check_settings(load("tiny_jpeg_lora", ["model.path=/nowhere", "sampling.height=17"]))
    check_settings(load("tiny_jpeg_lora", ["model.family=mine:Family", "sampling.height=17"]))


@pytest.mark.parametrize(
    ("model", "unread"),
    [
        (["model.path=nobody/nothing", "model.family=flux"], "true_cfg_scale"),
        (["model.path=nobody/nothing", "model.family=qwen_image"], "guidance_scale"),
        (["model.path=tiny_ocr"], "true_cfg_scale"),
    ],
)
def test_guidance_that_a_known_family_does_not_read_warns(model, unread):
    config = load("tiny_jpeg_lora", [*model, f"sampling.{unread}=4"])
    with pytest.warns(UserWarning, match=rf"^sampling\.{unread}=4\.0 .* sampling\."):
        check_settings(config)


@pytest.mark.parametrize("index", ["[]", "{}", "{", '{"vae": []}'])
def test_a_folder_that_is_no_pipeline_is_named(tmp_path, index):
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED["tiny_ocr"], folder)
    (folder / "model_index.json").write_text(index)
    with pytest.raises(ConfigError, match=rf"^model\.path='{folder}' .*pipeline: "):
        local_architecture(str(folder))


def test_prompts_are_read_and_compared_with_the_rewards(tmp_path):
    check_prompts(load("tiny_ocr_lora"))
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\na dog\n")
    (tmp_path / "held.txt").write_text('a "hen"\n')
    with pytest.raises(ConfigError, match=r"prompts\.txt:1: .* reward ocr "):
        check_prompts(
            load("tiny_ocr_lora", [f"data.path={file}", "data.heldout_path=" + str(tmp_path / "held.txt")])
        )
