"""flow_grpo's keys."""

import json

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate import translate
from flowcorr.translate.flow_grpo import with_script
from tests.translate.configs import GRPO, loaded, nested, value_at

SD3, FLUX, QWEN = "stabilityai/stable-diffusion-3.5-medium", "black-forest-labs/FLUX.1-dev", "Qwen/Qwen-Image"


def test_flow_grpos_values(grpo, tmp_path):
    text = translate(grpo, gpus=4)
    found = loaded(tmp_path, text)
    assert (found.rollout.prompts_per_step, found.rollout.n, found.actor.mini_batches) == (16, 16, 2)
    assert (found.sampling.sde_window_size, found.sampling.sde_window_range) == (9, (0, 9))
    assert found.sampling.sde_noise_range == (0, 10)
    assert (found.actor.kl_coef, found.actor.kl_weighting) == (0.04, "flow_grpo")
    assert found.algorithm.rollout_correction.mode == "bypass"
    assert (found.sampling.guidance_scale, found.trainer.seed) == (4.5, 42)
    assert (found.model.dtype, found.data.heldout_path) == ("float16", "dataset/ocr/test.txt")
    assert (found.model.lora.rank, found.model.lora.alpha, len(found.model.lora.targets)) == (32, 64, 8)
    assert [(term.name, term.weight) for term in found.reward.terms] == [
        ("pickscore", 1),
        ("my_rewards:geneval", 0.5),
    ]
    assert "population std" in text
    # A run that ends by itself would end before its first evaluation.
    assert found.trainer.total_steps > 100 * found.trainer.eval_every
    assert "total_steps: 100000  # flow_grpo always does this; default here: 30 (it trains until" in text
    assert text.startswith(
        "# Translated by flowcorr translate from general_ocr_sd3.json, as scripts/train_sd3.py runs it (flow_grpo)."
    )


def test_flow_grpo_needs_its_gpus(grpo, tmp_path):
    with pytest.raises(ConfigError, match="number of GPUs, .* --gpus N"):
        translate(grpo)
    assert loaded(tmp_path, translate(grpo, gpus=2)).rollout.prompts_per_step == 8


@pytest.mark.parametrize(
    ("given", "function", "script"),
    [
        ({"pretrained.model": SD3}, "geneval_sd3", "train_sd3.py"),
        ({"pretrained.model": SD3}, "geneval_sd3_fast", "train_sd3_fast.py"),
        ({"pretrained.model": SD3, "sample.sde_type": "cps"}, "a", "train_sd3_fast.py"),
        ({"pretrained.model": SD3, "rationorm": True}, "a", "train_sd3_GRPO_Guard.py"),
        ({"pretrained.model": FLUX}, "a", "train_flux.py"),
        ({"pretrained.model": FLUX}, "pickscore_flux_fast", "train_flux_fast.py"),
        ({"pretrained.model": QWEN}, "a_fast", "train_qwenimage.py"),
    ],
)
def test_the_script_that_reads_a_configuration(given, function, script):
    assert with_script(nested(given), function, 8)["script"] == script


def test_a_window_that_only_one_of_two_scripts_reads_needs_its_name():
    given = nested({"pretrained.model": SD3, "sample.sde_window_size": 2})
    both = r"script=train_sd3\.py or script=train_sd3_fast\.py$"
    with pytest.raises(ConfigError, match=rf"^sample\.sde_window_size=2 .* {both}"):
        with_script(given, "config", 8)
    assert with_script({**given, "script": "train_sd3.py"}, "config", 8)["script"] == "train_sd3.py"
    kontext = nested({"pretrained.model": "FLUX.1-Kontext-dev", "sample.sde_window_size": 2})
    with pytest.raises(ConfigError, match="edits images"):
        with_script(kontext, "config", 8)
    with pytest.raises(ConfigError, match=r"^script='train\.py' .* train_sd3\.py"):
        with_script({**given, "script": "train.py"}, "config", 8)


@pytest.mark.filterwarnings("error")
def test_a_script_that_is_named_is_not_an_override_without_a_line(grpo):
    assert "as scripts/train_sd3_fast.py runs it" in translate(grpo, ["script=train_sd3_fast.py"], gpus=8)


@pytest.mark.filterwarnings("ignore:no line of the recipe follows from")
@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["train.use_8bit_adam=True"], "actor.optimizer", "adamw_8bit"),
        (["train.use_8bit_adam=False"], "actor.optimizer", "adamw"),
        # The average moves at every eighth update, once for each of its 4 batches.
        (["train.ema=True"], "actor.ema", 0.948683),
        (["train.ema=True", "train.gradient_accumulation_steps=8"], "actor.ema", 0.9),
        (["train.ema=False"], "actor.ema", None),
        (["train.ema=True", f"pretrained.model={QWEN}"], "actor.ema", None),
        (["reward_fn={jpeg_compressibility: 1.0}"], "reward.terms.0.weight", 1 / 500),
        (["reward_fn={ocr: 1.0}"], "reward.terms.0.name", "ocr"),
        (["reward_fn={ocr_server: 1.0}"], "reward.terms.0.name", "my_rewards:ocr_server"),
        (["reward_fn={aesthetic: 1.0}"], "reward.terms.0.name", "aesthetic"),
        (["rationorm=True"], "actor.loss_mode", "grpo_guard"),
        (["sample.sde_type=cps"], "sampling.cps_unscaled", True),
        (["sample.sde_type=cps"], "actor.kl_weighting", "exact"),
        (["sample.sde_type=sde"], "actor.kl_weighting", "flow_grpo"),
        (["sample.sde_type=sde", "sample.sde_window_size=2"], "sampling.sde_window_size", 2),
        (["sample.sde_type=sde", "sample.sde_window_size=2"], "sampling.sde_window_range", (0, 5)),
        (
            ["sample.sde_window_size=2", "script=train_sd3.py"],
            "sampling.sde_window_size",
            9,
        ),  # it draws no windows
        (["train.timestep_fraction=0.5"], "sampling.sde_window_range", (0, 5)),
        ([f"pretrained.model={FLUX}"], "model.lora.rank", 64),
        ([f"pretrained.model={QWEN}"], "sampling.true_cfg_scale", 4.5),
        ([f"pretrained.model={QWEN}"], "sampling.negative_prompt", " "),
        ([f"pretrained.model={QWEN}"], "model.max_sequence_length", 512),
        (["use_lora=False", "train.beta=0", "mixed_precision=bf16"], "model.lora.rank", 0),
        (["use_lora=False", "train.beta=0", "mixed_precision=bf16"], "actor.autocast", True),
        (["prompt_fn=geneval"], "data.path", "dataset/ocr/train_metadata.jsonl"),
        (["dataset=''"], "data.path", "train.txt"),
        (["mixed_precision=bf16"], "model.dtype", "bfloat16"),
        (["mixed_precision='no'"], "model.dtype", "float32"),
        (["sample.global_std=False"], "algorithm.advantage_std", "group"),
    ],
)
def test_keys_that_depend_on_others(grpo, tmp_path, overrides, key, value):
    found = loaded(tmp_path, translate(grpo, overrides, gpus=4))
    if key.startswith("reward.terms.0."):
        assert getattr(found.reward.terms[0], key.rpartition(".")[2]) == value
    else:
        assert value_at(found, key) == value


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("pretrained.model=hub/DeepSeek-7b", "^pretrained.model=hub/DeepSeek-7b .*: sd3, "),
        ("train.algorithm=dpo", "^train.algorithm=dpo "),
        ("prompt_fn=imagenet_animals", "^prompt_fn=imagenet_animals "),
        ("per_prompt_stat_tracking=False", "^per_prompt_stat_tracking=False "),
        ("use_lora=False", "^use_lora=False with mixed_precision=fp16 "),
        ("train.cfg=False", "^train.cfg=False "),
        ("sample.num_image_per_prompt=1", "^sample.num_image_per_prompt=1 "),
        # 10.67 prompts are not 11.
        (
            "sample.num_image_per_prompt=24",
            "^4 GPUs x sample.train_batch_size=8 .* sample.num_image_per_prompt=24,",
        ),
        ("train.gradient_accumulation_steps=3", "multiple of train.gradient_accumulation_steps=3,"),
        ("train.gradient_accumulation_steps=0", "^train.gradient_accumulation_steps=0 .* 1 "),
        ("mixed_precision=fp8", "^mixed_precision='fp8' .* no, fp32, "),
        ("train.timestep_fraction=.nan", "^train.timestep_fraction=nan .* finite"),
        ("sample.num_batches_per_epoch=true", "^sample.num_batches_per_epoch=True .* whole number"),
        ("reward_fn={ocr: much}", "^reward_fn.ocr='much' .* number"),
    ],
)
def test_what_is_no_run_of_flowcorr_is_refused(grpo, override, named):
    with pytest.raises(ConfigError, match=named):
        translate(grpo, [override], gpus=4)


def test_a_file_of_another_trainer_is_refused_by_the_keys_that_it_lacks(tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"pretrained": GRPO["pretrained"], "seed": 1}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r" flow_grpo, .* resolution, .*, \.\.\. \(.*other\.json "):
        translate(str(path), gpus=8)


@pytest.mark.filterwarnings("ignore:no line of the recipe follows")
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.clip_range_lt=0.0001", False),  # as clip_range
        ("train.clip_range_gt=0.001", True),
        ("sample.eval_guidance_scale=4.5", False),
        ("sample.eval_guidance_scale=1.0", True),
        ("sample.test_batch_size=16", False),
        ("sample.unheard_of=0", True),
        ("train.unheard_of=0.5", True),
        ("resume_from=logs/run", True),
        ("allow_tf32=True", True),
    ],
)
def test_what_may_change_training_or_evaluations_is_named(grpo, override, named):
    assert (f"#   {override}\n" in translate(grpo, [override], gpus=4)) == named
