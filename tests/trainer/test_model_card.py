import ast

import pytest
import yaml

from flowcorr.config import load, to_mapping
from flowcorr.trainer.model_card import model_card
from flowcorr.trainer.run_config import RunConfig

RECORDS = [
    {"step": 0, "eval/reward": 0.25, "eval/reward_std": 0.1, "eval/image/dark": 0.5},
    {"step": 1, "reward/mean": 0.3},
    {
        "step": 2,
        "eval/reward": 0.5,
        "eval/pickscore": 20.5,
        "eval/hue_std": 0.75,
        "eval/reward_std": 0.1,
        "eval/scored_images": 63,
        "eval/failed_samples": 1,
        "eval/image/dark": 0.5,
    },
]


def card_of(recipe, family, *overrides, step=2, picture=None, merged=False, folder="exported"):
    config = load(recipe, overrides)
    run = RunConfig(config=config, values=to_mapping(config), left_out={})
    return model_card(
        run,
        family=family,
        title="a_run",
        folder=folder,
        step=step,
        records=RECORDS,
        picture=picture,
        merged=merged,
    )


def front_matter(card):
    return yaml.safe_load(card.split("---\n")[1])


@pytest.mark.parametrize(
    ("recipe", "family", "task"),
    [
        ("sd35_medium_ocr_lora", "sd3", "text-to-image"),
        ("qwen_image_edit_plus_lora", "qwen_image_edit_plus", "image-to-image"),
        ("wan_ocr_lora", "wan", "text-to-video"),
        ("flux_dev_pickscore_lora", "my_model:Family", "text-to-image"),
    ],
)
def test_the_hub_is_told_base_and_task(recipe, family, task):
    facts = front_matter(card_of(recipe, family))
    assert facts["base_model"] == load(recipe).model.path
    assert (facts["base_model_relation"], facts["library_name"], facts["pipeline_tag"]) == (
        "adapter",
        "diffusers",
        task,
    )


@pytest.mark.parametrize("path", ["tiny_ocr", "/models/mine", "./mine"])
def test_a_base_that_is_not_on_the_hub_is_no_link(path):
    card = card_of("tiny_ocr_lora", "sd3", f"model.path={path}")
    assert "base_model" not in front_matter(card)
    assert f"for `{path}`" in card


def test_scores_stand_beside_those_before_training():
    card = card_of("sd35_medium_ocr_lora", "sd3")
    assert "| reward | 0.25 | 0.5 |\n| pickscore | - | 20.5 |\n| hue_std | - | 0.75 |\n\n" in card
    assert "dark" not in card
    assert "## Scores" not in card_of("sd35_medium_ocr_lora", "sd3", step=1)


@pytest.mark.parametrize(
    ("family", "line"),
    [
        ("sd3", "pipe.load_lora_weights(folder)"),
        ("ovis_image", "pipe.transformer.load_lora_adapter(folder, use_safetensors=True)"),
        ("my_model:Family", "pipe.transformer.load_lora_adapter(folder, use_safetensors=True)"),
    ],
)
def test_a_pipeline_without_a_loader_is_loaded_by_its_transformer(family, line):
    assert f"\n{line}\n" in card_of("ovis_image_ocr_lora", family)


@pytest.mark.parametrize("folder", ["runs/mine", "runs/\U0001f408", 'a "b" \\c'])
def test_the_folder_is_named_as_it_is(folder):
    (line,) = [
        line for line in card_of("tiny_ocr_lora", "sd3", folder=folder).splitlines() if "folder = " in line
    ]
    assert ast.literal_eval(line.partition("=")[2].partition("#")[0].strip()) == folder


def test_all_weights_are_no_adapter():
    card = card_of("tiny_ocr_lora", "sd3", "model.lora.rank=0")
    assert "lora" not in front_matter(card)["tags"]
    assert 'AutoModel.from_pretrained(folder, subfolder="transformer"' in card
    assert "peft" not in card


def test_a_picture_is_shown_where_there_is_one():
    assert "](images/before_after.png)" in card_of("tiny_ocr_lora", "sd3", picture="images/before_after.png")
    assert "![" not in card_of("tiny_ocr_lora", "sd3")
