"""Overrides of a recipe, and the keys that they change beside their own."""

import re
import warnings
from dataclasses import replace

import pytest

from flowcorr.config import (
    Config,
    load,
    recipe_names,
    redact_override,
    to_yaml,
)
from flowcorr.correction import OFF
from flowcorr.correction.config import RolloutCorrectionConfig
from flowcorr.errors import ConfigError

SECTION = "algorithm.rollout_correction"


def test_one_key_switches_the_mode(bare):
    presets = ("bypass_ppo_clip", "seq_is", "disabled")
    modes = [load("tiny_ocr_lora", [f"{SECTION}.preset={preset}"]) for preset in presets]
    corrections = [config.algorithm.rollout_correction for config in modes]
    assert [correction.bypass_mode for correction in corrections] == [True, False, False]
    assert [correction.rollout_is for correction in corrections] == [None, "sequence", None]
    assert load("tiny_ocr_lora", [f"{SECTION}=null"]).algorithm.rollout_correction == OFF
    assert load(bare).algorithm.rollout_correction.label == "measured only"
    assert load(bare, [f"{SECTION}.bypass_mode=true"]).algorithm.rollout_correction.mode == "bypass"
    assert len({to_yaml(replace(config, algorithm=Config().algorithm)) for config in modes}) == 1


@pytest.mark.parametrize("name", recipe_names())
def test_one_key_switches_the_mode_of_every_recipe(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "algorithm.rollout_correction.preset=.* replaces")
        config = load(name, [f"{SECTION}.preset=decoupled_token_is", f"{SECTION}.rollout_is_threshold=3"])
    expected = RolloutCorrectionConfig.token_is(threshold=3.0)
    assert replace(config.algorithm.rollout_correction, preset=None) == replace(expected, preset=None)


EXPLICIT = "qwen_image_ocr_lora_rollout_corr"  # a recipe that says its mode key by key


def test_a_preset_tells_what_gave_way_to_it(recipe):
    lost = "bypass_mode, rollout_is, rollout_rs, rollout_rs_threshold"
    with pytest.warns(UserWarning, match=f"^{SECTION}.preset=seq_is .*'s {lost}$"):
        load(EXPLICIT, [f"{SECTION}.preset=seq_is"])
    flat = recipe("algorithm: {advantage_std: none, rollout_is: true, rollout_is_threshold: 3}")
    with pytest.warns(UserWarning, match="preset=bypass_ppo_clip .*'s rollout_is, rollout_is_threshold$"):
        config = load(flat, [f"{SECTION}.preset=bypass_ppo_clip"])
    assert config.algorithm.rollout_correction == RolloutCorrectionConfig.bypass_ppo_clip()
    assert config.algorithm.advantage_std == "none"
    written = recipe(to_yaml(load("tiny_ocr_lora_bypass")))
    with pytest.warns(
        UserWarning, match="preset=disabled .*'s bypass_mode, rollout_rs, rollout_rs_threshold$"
    ):
        config = load(written, [f"{SECTION}.preset=disabled"])
    assert config.algorithm.rollout_correction == RolloutCorrectionConfig.disabled()


def test_what_is_said_beside_a_preset_on_the_command_line_stays():
    overrides = [f"{SECTION}.log_ratio_scale=sqrt", f"{SECTION}.preset=decoupled_seq_is"]
    correction = load("tiny_ocr_lora", overrides).algorithm.rollout_correction
    assert (correction.rollout_is, correction.log_ratio_scale) == ("sequence", "sqrt")


def test_a_key_that_contradicts_the_recipes_preset_is_taken_without_it():
    contradiction = f"{SECTION}.rollout_is=token"
    with pytest.raises(ConfigError, match=rf"rollout_is='token' .*preset='disabled'.*{SECTION}\.preset=null"):
        load("tiny_ocr_lora", [contradiction])
    correction = load("tiny_ocr_lora", [contradiction, f"{SECTION}.preset=null"]).algorithm.rollout_correction
    assert (correction.preset, correction.rollout_is) == (None, "token")


def test_overrides(bare):
    config = load(
        bare,
        [
            "trainer.seed=3",
            "actor.lr=2e-4",
            "sampling.sde_window_range=[1, 5]",
            "model.lora.targets=null",
            "sampling.guidance_scale=4",
            "sampling.negative_prompt=a=b, c",
            "reward.terms=[{name: ocr}, {name: jpeg_compressibility, weight: 0.1}]",
            "reward.terms[0].weight=2",
            "trainer.total_steps=${trainer.seed}",
            "data.num_heldout=1e2",
        ],
    )
    assert (config.trainer.seed, config.trainer.total_steps, config.actor.lr) == (3, 3, 2e-4)
    assert config.sampling.sde_window_range == (1, 5)
    assert config.data.num_heldout == 100
    assert type(config.data.num_heldout) is int
    assert config.sampling.negative_prompt == "a=b, c"
    assert [term.weight for term in config.reward.terms] == [2.0, 0.1]


def test_an_empty_mapping_empties_what_the_recipe_says(recipe):
    text = "rollout: {name: vllm_omni, engine: {quantization: fp8}}\nactor: {lr: 1.0e-5, epochs: 2}"
    assert load(recipe(text), ["rollout.engine={max_num_seqs: 4}"]).rollout.engine == {
        "quantization": "fp8",
        "max_num_seqs": 4,
    }
    emptied = load(recipe(text), ["rollout.engine={}", "actor={}", "actor.epochs=3"])
    assert emptied.rollout.engine == {}
    assert (emptied.actor.lr, emptied.actor.epochs) == (Config().actor.lr, 3)


@pytest.mark.parametrize("entry", ["[3]", "[ocr]", ".ocr", ""])
def test_override_of_an_entry_that_a_list_has_not(recipe, entry):
    override = f"reward.terms{entry}.weight=1"
    with pytest.raises(ConfigError, match=f"^{re.escape(override)} cannot"):
        load(recipe("reward: {terms: [{name: ocr}]}"), [override])


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["trainer.seed", "=", "1"], "trainer.seed=1"),
        (["actor.lr=1e-4", "trainer.seed=", "1"], "trainer.seed=1"),
        (["trainer.seed", "=1", "rollout.n", "=", "4"], "trainer.seed=1 rollout.n=4"),
        (["reward.terms.0.api_key", "=", "sesame"], r"reward.terms.0.api_key=\*\*\*"),
    ],
)
def test_blanks_around_the_equals_sign_are_named(bare, words, meant):
    with pytest.raises(ConfigError, match=rf" write {meant} \(in "):
        load(bare, words)


def test_overrides_are_shown_without_their_secrets():
    secrets = ["reward.terms=[{name: jpeg, api_key: sesame}]", "reward.terms.0.api_key=sesame"]
    assert [redact_override(text) for text in ["rollout.n=4", "a.b=[1", "a.b={key: c", *secrets]] == [
        "rollout.n=4",
        "a.b=[1",
        "a.b=***",
        "reward.terms=***",
        "reward.terms.0.api_key=***",
    ]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ["trainer.seed=0.5", "reward.terms.0.api_key=sesame"],
            r"^trainer\.seed=0\.5 .*with trainer\.seed=0\.5 reward\.terms\.0\.api_key=\*\*\*\)$",
        ),
        (["reward.terms=[{api_key: sesame"], r"^reward\.terms=\*\*\* .* YAML \(in "),
    ],
)
def test_an_error_shows_overrides_without_their_secrets(bare, overrides, named):
    with pytest.raises(ConfigError, match=named) as caught:
        load(bare, overrides)
    assert "sesame" not in str(caught.value)
