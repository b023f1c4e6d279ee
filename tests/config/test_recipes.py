"""What the recipes for real models promise: a source, a machine, a word on their clip range, prompts at hand."""

from pathlib import Path

import pytest

from flowcorr.config import DataConfig, find_recipe, load, recipe_names
from flowcorr.data import load_prompts

ROOT = Path(__file__).parents[2]
REAL = [name for name in recipe_names() if not name.startswith("tiny_")]
IMAGES = [name for name in REAL if load(name).sampling.num_frames is None]
# Mean |delta| of SD3.5 in bfloat16 that verl-omni issue 280 reports, lowest and highest.
NOISE_FLOOR = (2e-5, 5e-4)


@pytest.mark.parametrize("name", IMAGES)
def test_header_says_where_from_how_large_and_how_the_clip_stands(name):
    text = find_recipe(name).read_text(encoding="utf-8")
    header = " ".join(line.lstrip("# ") for line in text.split("\nmodel:")[0].splitlines())
    clip = load(name).actor.clip_ratio
    low, high = NOISE_FLOOR
    assert clip < high  # else there is nothing to warn of
    for promise in (
        "Source: ",
        "Needs (flowcorr plan) ",
        f"Clip: {clip:.0e}".replace("e-0", "e-") if "rollout_corr" not in name else "Clip: here it sees",
        f"lies {'below' if clip < low else 'within'} the noise floor",
        f"`flowcorr audit {name}`",
    ):
        assert promise in header, promise


@pytest.mark.parametrize("name", recipe_names())
def test_header_ends_in_what_was_verified(name):
    """`tiny`: trained by `tests/trainer/test_recipes_run.py` on a tiny random pipeline, or on the embedded model."""
    header = find_recipe(name).read_text(encoding="utf-8").split("\nmodel:")[0]
    assert header.endswith("verified: tiny")


@pytest.mark.parametrize("name", IMAGES)
def test_it_samples_in_bfloat16_with_the_engine_or_on_the_trainers_card(name):
    config = load(name)
    assert config.rollout.name == ("in_process" if name.endswith("gb") else "vllm_omni")
    assert config.rollout.dtype == config.model.dtype == "bfloat16"
    assert config.rollout.calculate_log_probs
    assert config.algorithm.rollout_correction.mode != "off"  # so that the gap is measured


@pytest.mark.parametrize("path", sorted({load(name).data.path for name in REAL}))
def test_its_prompts_are_at_hand_and_have_targets(path):
    prompts = load_prompts(DataConfig(path=str(ROOT / path)))
    every = (*prompts.train, *prompts.heldout)
    assert len(every) == len({prompt.text for prompt in every}) == 240
    assert len(prompts.heldout) >= 16
    assert all(prompt.target and f'"{prompt.target}"' in prompt.text for prompt in every)
