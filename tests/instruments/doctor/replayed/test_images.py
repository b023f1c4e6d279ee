"""Images and rewards of captured samples."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowcorr.config import load
from flowcorr.instruments.doctor.replayed.images import examine_images, examine_reward
from flowcorr.records import Prompt
from flowcorr.rewards import build_reward


def test_images_in_order(stack_of):
    found = examine_images(stack_of(), 2, {})
    assert (found.status, found.step, found.part) == ("PASS", 2, "decode")


def test_all_of_a_batch_swapped_is_certain(stack_of, captured):
    images = captured["images"][:4].roll(1, 0)
    found = examine_images(stack_of(images=images, prompts=captured["prompts"][:4]), 0, {})
    assert (found.cause, found.confidence) == ("swapped_images", "certain")


def test_one_image_of_many(stack_of, captured):
    images = captured["images"].clone()
    images[2] = images[0]
    found = examine_images(stack_of(images=images), 0, {})
    assert (found.cause, found.confidence) == ("swapped_images", "certain")
    assert [value > 1 for value in found.samples] == [False, False, True, False]


def test_upside_down(stack_of, captured):
    found = examine_images(stack_of(images=captured["images"].flip(2)), 0, {})
    assert found.cause == "flipped_images"


def test_images_that_are_alike_cannot_be_told(stack_of, captured):
    same = {
        name: captured[name][:1].expand(8, *captured[name].shape[1:]) for name in ("images", "final_latents")
    }
    found = examine_images(stack_of(**same), 0, {})
    assert (found.status, found.message) == ("SKIP", "cannot tell: images of different samples are alike")


def test_the_vae_keeps_its_numbers(stack_of, captured):
    stack = stack_of(images=torch.zeros_like(captured["images"]))
    before = dict(stack.family.pipeline.vae.config)
    assert examine_images(stack, 0, {}).status == "WARN"
    assert dict(stack.family.pipeline.vae.config) == before


def test_a_reward_again(stack_of):
    config = load("tiny_jpeg_lora", ["data.num_train=4", "data.num_heldout=2"])
    samples = stack_of().samples
    scores = build_reward(config.reward.terms)(samples.images.numpy(), [Prompt(text="x")] * 4)
    right = replace(samples, rewards=torch.as_tensor(np.asarray(getattr(scores, "scores", scores))))
    assert examine_reward(right, config, 0).status == "PASS"
    swapped = replace(samples, rewards=right.rewards.flip(0))
    assert examine_reward(swapped, config, 0).status == "WARN"
    assert examine_reward(right, None, 0).remedy.startswith("give --model a recipe")


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ("[{name: ocr}]", "cannot tell: .*target"),
        ("[{name: jpeg_compressibility, tags: [colors]}]", "cannot tell: the recipe's data has no prompt"),
    ],
)
def test_a_prompt_that_the_recipe_lacks_cannot_be_scored(stack_of, terms, reason):
    config = load("tiny_jpeg_lora", [f"reward.terms={terms}", "trainer.best_metric=eval/reward"])
    samples = replace(stack_of().samples, rewards=torch.zeros(4))
    found = examine_reward(samples, config, 0)
    assert found.status == "SKIP"
    assert re.match(reason, found.message)
