"""Every recipe for a real model trains, with the tiny random pipeline of its family in place of the model.

Those for Qwen-Image-Edit need torchvision, for its processor.
"""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_pipelines
import torch

from flowcorr.cli import main
from flowcorr.config import RewardConfig, RewardTerm, load, recipe_names, to_yaml
from flowcorr.trackers.jsonl import read_metrics
from tests.trainer.runs import assert_same_run

ROOT = Path(__file__).parents[2]
RECIPES = [name for name in recipe_names() if not name.startswith("tiny_")]
SIGNS = ROOT / "recipes/sign_edits.jsonl"
EDITING = [*(name for name in RECIPES if "_edit_" in name), "flux2_klein_pickscore_lora"]
ON_ONE_CARD = [name for name in RECIPES if load(name).rollout.name == "in_process"]
ONE_OF_EACH_MODEL = [*{load(name).model.path: name for name in RECIPES if name not in ON_ONE_CARD}.values()]

IN_PROCESS = ("rollout.name=in_process", "rollout.engine={}")


def marks(recipe):
    """The markers of tests that need bitsandbytes, for a recipe that does."""
    config = load(recipe)
    found = [pytest.mark.quantized] * (config.model.quantization == "nf4")
    return [*found, *[pytest.mark.adam8bit] * (config.actor.optimizer == "adamw_8bit")]


def in_bypass_mode(recipe):
    """The keys that a recipe lacks to run in this process and in bypass mode."""
    if load(recipe).algorithm.rollout_correction.bypass_mode:
        return IN_PROCESS
    return (*IN_PROCESS, "algorithm.rollout_correction.preset=bypass_ppo_clip_auto_rs")


def with_marks(recipes):
    return [pytest.param(name, marks=marks(name)) for name in recipes]


# On images of noise OCR reads nothing, and equal rewards teach nothing: this one tells them apart.
JPEG = RewardTerm(name="jpeg_incompressibility")
SMALL = (
    "model.max_sequence_length=16",
    "model.offload_text_encoders=false",
    "sampling.num_inference_steps=6",  # no window lies further behind
    "rollout.prompts_per_step=2",
    "rollout.n=2",
    "reward.placement=auto",
    "reward.num_workers=1",
    "data.heldout_fraction=0.5",
    "data.num_heldout=2",
    "trainer.device=cpu",
    "trainer.total_steps=2",
    "trainer.eval_every=0",
    "trainer.eval_num_inference_steps=2",
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """Recipe -> folder of its family's tiny pipeline in bfloat16, and the pipeline's row; each is built once."""
    root = tmp_path_factory.mktemp("models")

    def get(recipe):
        tiny = tiny_pipelines.of_recipe(recipe)
        folder = root / tiny.build.__name__
        if not folder.exists():
            tiny.build(folder, dtype=torch.bfloat16)
        return folder, tiny

    return get


@pytest.fixture(scope="module")
def tiny_pickscore(tmp_path_factory):
    """A CLIP checkpoint with random weights, and its processor."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 54, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    config = CLIPConfig(
        text_config={**shape, **text, "pad_token_id": 1},
        vision_config={**shape, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    folder = tmp_path_factory.mktemp("pickscore")
    CLIPModel(config).save_pretrained(folder)
    CLIPProcessor(image_processor=images, tokenizer=tiny_pipelines.clip_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def small(tiny_model, tmp_path):
    """`small(recipe, *overrides)` loads a recipe with its tiny model, few samples and the first of its prompts.

    `shipped` is the file of its prompts, where it is not the recipe's.
    """

    def small(recipe, *overrides, shipped=None):
        folder, tiny = tiny_model(recipe)
        height, width = tiny.size
        prompts = tmp_path / "prompts.jsonl"
        shipped = shipped or ROOT / load(recipe).data.path
        lines = shipped.read_text(encoding="utf-8").splitlines(keepends=True)
        prompts.write_text("".join(lines[:8]), encoding="utf-8")
        images = shipped.with_suffix("")
        if images.is_dir():
            (tmp_path / images.name).symlink_to(images)
        swap = (
            f"model.path={folder}",
            f"sampling.height={height}",
            f"sampling.width={width}",
            f"sampling.num_frames={tiny.frames or 'null'}",
            f"data.path={prompts}",
        )
        return load(recipe, [*SMALL, *swap, *overrides])

    return small


def with_rewards(config, *, terms, gold=()):
    often = config.reward.gold_every if gold else RewardConfig().gold_every
    return replace(config, reward=replace(config.reward, terms=terms, gold=gold, gold_every=often))


def run(config, folder, *arguments):
    """Train by the command line, which looks at a model's folder before it loads the model."""
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(to_yaml(config), encoding="utf-8")
    assert main(["train", str(recipe), "--out", str(folder), *arguments]) == 0


def assert_trains(config, folder):
    run(config, folder)
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "reward/mean" in record]
    assert len(records) == 2
    for record in records:
        assert all(math.isfinite(value) for value in record.values())
        assert record["actor/updates"] == config.actor.mini_batches
        assert record["actor/grad_norm"] > 0
        assert record["rollout_corr/logprob_abs_diff_mean"] < 1e-2


@pytest.mark.parametrize("recipe", with_marks(RECIPES))
def test_recipe_runs_in_process(recipe, small, tiny_pickscore, tmp_path):
    """Those for one card, which are shipped so, also resume to the bit."""
    config = small(recipe, "trainer.save_every=1", *IN_PROCESS)
    options = {
        "ocr": {"detect": False},  # the detector enlarges every image: a second each
        "pickscore": {"path": tiny_pickscore, "processor": tiny_pickscore},
        "reference_similarity": {"path": tiny_pickscore},
    }
    own = [replace(term, options=options[term.name]) for term in config.reward.terms]
    gold = tuple(replace(term, options=options[term.name]) for term in config.reward.gold)
    config = with_rewards(config, terms=(*own, JPEG), gold=gold)
    if recipe in ON_ONE_CARD:
        assert_resumes(config, tmp_path)
    else:
        assert_trains(config, tmp_path / "run")


@pytest.mark.parametrize("recipe", ONE_OF_EACH_MODEL)
def test_a_recipe_resumes_in_process_and_in_bypass_mode(recipe, small, tmp_path):
    config = small(recipe, "trainer.save_every=1", *in_bypass_mode(recipe))
    assert_resumes(with_rewards(config, terms=(JPEG,)), tmp_path)


@pytest.mark.parametrize("preset", ["disabled", "bypass_ppo_clip"])
@pytest.mark.parametrize("recipe", EDITING)
def test_an_editing_recipe_resumes_in_both_modes(recipe, preset, small, tmp_path):
    overrides = (f"algorithm.rollout_correction.preset={preset}", "trainer.save_every=1")
    config = small(recipe, *IN_PROCESS, *overrides, shipped=SIGNS)
    assert_resumes(with_rewards(config, terms=(JPEG,)), tmp_path)


def assert_resumes(config, tmp_path):
    assert_trains(config, tmp_path / "whole")
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    run(config, folder, "--resume")
    assert_same_run(tmp_path / "whole", folder)
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "reward/mean" in record]
    assert all(record["rollout_corr/logprob_abs_diff_mean"] < 1e-6 for record in records)  # shared weights


def test_a_step_that_an_engine_gets_wrong_is_rejected_and_said(small, tmp_path, capsys):
    """The centre of the bypass recipe, as it is shipped: a band measured on the training steps before."""
    engine = (
        "rollout.name=tests.trainer.faulty_engine:FAULTY",
        "rollout.n=8",
        "sampling.sde_window_range=[0, 2]",
        "trainer.on_fault=warn",
    )
    config = small("qwen_image_ocr_lora_rollout_corr", *engine, "trainer.total_steps=5")
    run(with_rewards(config, terms=(JPEG,)), tmp_path / "run")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    rejected = [record["actor/rollout_corr/rollout_rs_masked_fraction"] for record in records]
    assert rejected == [0, 0, 0, 4 / 32, 4 / 32]
    assert records[-1]["rollout_corr/step_1/masked_fraction"] == 1 / 4
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert ["rejection measuring" in line for line in said] == [True] * 3 + [False] * 2
    assert ["rejected 12" in line for line in said] == [False] * 3 + [True] * 2


@pytest.mark.vllm_omni
@pytest.mark.filterwarnings("ignore")  # of vLLM's own
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ON_ONE_CARD])
def test_recipe_runs_with_its_engine(recipe, small, tmp_path, monkeypatch):
    from flowcorr.rollout.vllm_omni.engine import VllmOmniEngine

    sample, rollouts = VllmOmniEngine.sample, []

    def spy(*args, **options):
        rollouts.append(sample(*args, **options))
        return rollouts[-1]

    monkeypatch.setattr(VllmOmniEngine, "sample", spy)
    config = small(recipe, "trainer.doctor=false")  # which would sample too
    assert_trains(with_rewards(config, terms=(JPEG,)), tmp_path / "run")
    assert len(rollouts) == 2
