"""Captured rewards beside those of a recipe."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from flowcorr.config import load
from flowcorr.instruments.doctor.checks.reward import check_captured_reward
from flowcorr.records import Prompt
from flowcorr.rewards import build_reward


def test_a_reward_again(captured_of):
    config = load("tiny_jpeg_lora", ["data.num_train=4", "data.num_heldout=2"])
    samples = captured_of().stack.samples
    scores = build_reward(config.reward.terms)(samples.images.numpy(), [Prompt(text="x")] * 4)
    right = torch.as_tensor(np.tile(getattr(scores, "scores", scores), 2))
    assert check_captured_reward(captured_of(rewards=right, config=config)).level == "healthy"
    assert check_captured_reward(captured_of(rewards=right.flip(0), config=config)).level == "warning"
    without = check_captured_reward(captured_of(rewards=right))
    assert (without.level, "--model" in without.remedy) == ("note", True)


@pytest.mark.parametrize(
    ("rewards", "level"),
    [
        ([math.nan, 1, math.nan, 3, math.nan, 5, 6, 7], "healthy"),
        ([math.nan, 3, math.nan, 1, math.nan, 5, 6, 7], "warning"),
        ([math.nan] * 8, "note"),
    ],
)
def test_images_on_which_the_reward_failed_are_not_compared(
    rewards, level, captured_of, tmp_path, monkeypatch
):
    """As under `drop_group`: on the first image it fails each time, on the third it failed once."""
    source = "def failing(images, prompts):\n    return [float('nan'), *range(1, len(prompts))]\n"
    (tmp_path / "failing.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = ["reward.terms=[{name: 'failing:failing'}]", "reward.on_error=drop_group"]
    config = load("tiny_jpeg_lora", [*overrides, "data.num_train=4", "data.num_heldout=2"])
    assert check_captured_reward(captured_of(rewards=torch.tensor(rewards), config=config)).level == level


@pytest.mark.parametrize(("captured_score", "level"), [(1 / 3, "healthy"), (0.334, "warning")])
def test_rounding_of_scores_that_are_all_one_is_no_difference(
    captured_score, level, captured_of, tmp_path, monkeypatch
):
    (tmp_path / "third.py").write_text("def third(images, prompts):\n    return [1 / 3] * len(prompts)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = ["reward.terms=[{name: 'third:third'}]", "data.num_train=4", "data.num_heldout=2"]
    rewards = torch.full((8,), captured_score, dtype=torch.float32)
    found = check_captured_reward(captured_of(rewards=rewards, config=load("tiny_jpeg_lora", overrides)))
    assert found.level == level


@pytest.mark.parametrize(
    ("terms", "prompt"),
    [("[{name: ocr}]", None), ("[{name: jpeg_compressibility, tags: [colors]}]", "cat")],
)
def test_a_prompt_that_the_recipe_lacks_cannot_be_scored(captured_of, terms, prompt):
    config = load("tiny_jpeg_lora", [f"reward.terms={terms}", "trainer.best_metric=eval/reward"])
    found = check_captured_reward(captured_of(rewards=torch.zeros(8), config=config))
    assert (found.level, found.numbers.get("prompt")) == ("note", prompt)


def test_a_text_with_several_references_cannot_be_scored(captured_of, tmp_path):
    for shade in range(8):
        Image.new("RGB", (32, 32), (30 * shade,) * 3).save(tmp_path / f"{shade}.png")
    lines = [{"prompt": "cat", "image": f"{shade}.png"} for shade in range(8)]
    (tmp_path / "edits.jsonl").write_text("\n".join(map(json.dumps, lines)))
    overrides = [f"data.path={tmp_path}/edits.jsonl", "data.heldout_fraction=0.5"]
    config = load("tiny_jpeg_lora", overrides)
    found = check_captured_reward(captured_of(rewards=torch.zeros(8), config=config))
    assert (found.level, found.numbers["prompt"]) == ("note", "cat")
