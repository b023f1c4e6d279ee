import math
import re

import pytest

from flowcorr.config import (
    Config,
    find_recipe,
    load,
    load_mapping,
    recipe_names,
    to_mapping,
    to_yaml,
)
from flowcorr.correction.config import RolloutCorrectionConfig
from flowcorr.errors import ConfigError

SECTION = "algorithm.rollout_correction"


def test_a_recipe_without_keys_is_all_defaults(bare):
    assert load(bare) == Config()


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_without_warnings_and_round_trips(name, recipe):
    config = load(name)
    assert load(recipe(to_yaml(config))) == config
    assert load_mapping(to_mapping(config)) == config
    assert len(find_recipe(name).read_text(encoding="utf-8").splitlines()) < 40


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_says_how_to_run_it(name):
    header = find_recipe(name).read_text(encoding="utf-8").split("\nmodel:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"flowcorr train {name}" in header


def test_shipped_recipes():
    assert recipe_names() == [
        "flux2_klein_pickscore_lora",
        "flux_dev_pickscore_lora",
        "flux_kontext_edit_lora",
        "ovis_image_ocr_lora",
        "qwen_image_edit_plus_lora",
        "qwen_image_ocr_grpo_guard_lora",
        "qwen_image_ocr_lora_24gb",
        "qwen_image_ocr_lora_2x32gb",
        "qwen_image_ocr_lora_decoupled",
        "qwen_image_ocr_lora_rollout_corr",
        "sd35_medium_ocr_lora",
        "sd35_medium_ocr_lora_12gb",
        "sd35_medium_ocr_lora_bypass",
        "tiny_jpeg_lora",
        "tiny_ocr_lora",
        "tiny_ocr_lora_bypass",
        "tiny_ocr_lora_grpo_guard",
        "wan_ocr_lora",
        "z_image_pickscore_lora",
    ]


@pytest.mark.parametrize("quote", ["", "'", '"'])
@pytest.mark.parametrize(
    ("text", "band"),
    [("0.5_2", (0.5, 2.0)), ("0.5_2.0", (0.5, 2.0)), ("0.999_1.001", (0.999, 1.001)), ("1_5", (1.0, 5.0))],
)
def test_bands_are_not_numbers(recipe, bare, text, band, quote):
    keys = f"rollout_rs: seq_sum_k1, rollout_rs_threshold: {quote}{text}{quote}"
    from_file = load(recipe(f"algorithm: {{rollout_correction: {{{keys}}}}}"))
    from_override = load(
        bare, [f"{SECTION}.rollout_rs=seq_sum_k1", f"{SECTION}.rollout_rs_threshold={quote}{text}{quote}"]
    )
    for config in (from_file, from_override):
        (criterion,) = config.algorithm.rollout_correction.criteria
        assert (
            criterion
            == RolloutCorrectionConfig(rollout_rs="seq_sum_k1", rollout_rs_threshold=band).criteria[0]
        )


def test_infinite_cap_round_trips(recipe):
    weighted = f"{SECTION}.preset=decoupled_seq_is"
    config = load("tiny_ocr_lora", [weighted, f"{SECTION}.rollout_is_threshold=.inf"])
    assert config.algorithm.rollout_correction.rollout_is_threshold == math.inf
    assert load(recipe(to_yaml(config))) == config
    assert load("tiny_ocr_lora", [weighted, f"{SECTION}.rollout_is_threshold=inf"]) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.lrr=1", r"actor\.lrr.* is unknown.*did you mean actor\.lr\?"),
        ("actr.lr=1", r"actr.* is unknown \(did you mean actor\?\); choose from model, "),
        ("seed=1", r"key='seed' is unknown \(did you mean trainer\.seed\?\); choose from model, "),
        ("lr=1e-4", r"did you mean actor\.lr\?"),
        ("n=8", r"did you mean rollout\.n\?"),
        ("timeout=60", r"did you mean rollout\.timeout or reward\.timeout\?"),
        ("rank=8", r"did you mean model\.lora\.rank\?"),
        ("preset=seq_is", r"did you mean algorithm\.rollout_correction\.preset\?"),
        ("weight=2", r"key='weight' is unknown; choose from model, [^(]* \(in"),
        ("actor.lr=fast", r"actor\.lr='fast' must be a number"),
        ("actor.lr=true", r"actor\.lr=True must be a number"),
        ("actor.lr='1e-4'", r"actor\.lr='1e-4' must be a number"),
        ("actor.lr=null", r"actor\.lr=None must be a number"),
        ("actor.lr=0", r"actor\.lr=0\.0 is out of range; it must be above 0"),
        ("actor.lr=.nan", r"actor\.lr=nan is out of range"),
        ("actor.clip_ratio=wide", r"actor\.clip_ratio='wide' must be a number"),
        (
            "actor.clip_ratio=1e-4,1e-4",
            r"clip_ratio='1e-4,1e-4' must be a number, or a list of numbers, such as \[1e-4, 1e-4\] \(in",
        ),
        ("actor.grad_clip=.inf", r"actor\.grad_clip=inf is out of range; it must be finite and above 0"),
        ("actor.importance_cap=0.9", r"actor\.importance_cap=0\.9 is out of range; it must be at least 1"),
        ("actor.clip_ratio=0", r"actor\.clip_ratio=0\.0 is out of range; it must be above 0"),
        ("actor.clip_ratio=[0.1, x]", r"actor\.clip_ratio\[1\]='x' must be a number"),
        ("actor.clip_ratio=[0.1, -1]", r"actor\.clip_ratio=-1\.0 is out of range; it must be above 0"),
        ("rollout.cache=first_block", r"rollout\.cache: caching of blocks was removed.*leave this key out"),
        ("actor.clip_center=drift", r"key='actor\.clip_center' is unknown.*; choose from actor\.loss_mode, "),
        ("actor.old_policy=currant", r"actor\.old_policy='currant' is unknown \(did you mean current\?"),
        ("actor.compile=1", r"actor\.compile=1 must be true or false"),
        ("actor.compile=off", r"actor\.compile='off' must be true or false"),
        ("trainer.total_steps=2.5", r"trainer\.total_steps=2\.5 must be a whole number"),
        ("trainer.total_steps=1e400", r"total_steps=1e400 is not valid YAML: the number 1e400 is beyond float64"),
        ("trainer.seed=1e23", r"seed=1e\+23 is too large to be written with an exponent; write its digits"),
        ("trainer.seed=9999999999999999999", r"seed=9999999999999999999 is out of range; it must be at most 922337"),
        ("sampling.noise_level=1e30", r"noise_level=1e\+30 is out of range; it must be at most 10 "),
        ("sampling.guidance_scale=1e30", r"guidance_scale=1e\+30 is out of range; it must be at most 1000 "),
        ("sampling.num_inference_steps=1e9", r"num_inference_steps=1000000000 is out of range"),
        ("sampling.width=1e6", r"sampling\.width=1000000 is out of range; it must be at most 16384"),
        ("trainer.eval_height=1e6", r"trainer\.eval_height=1000000 is out of range; it must be at most 16384"),
        ("trainer.total_steps=true", r"trainer\.total_steps=True must be a whole number"),
        ("trainer.total_steps=1_000", r"trainer\.total_steps='1_000' must be a whole number"),
        ("model.path=7", r"model\.path=7 must be text"),
        ("trainer.trackers=wandb", r"trainer\.trackers='wandb' must be a list, such as \[wandb\]"),
        ("trainer.trackers=wandb, tensorboard", r"must be a list, such as \[wandb, tensorboard\] \(in"),
        ("reward.terms=ocr", r"reward\.terms='ocr' must be a list, such as \[\{name: ocr\}\] \(in"),
        ("reward.terms=null", r"reward\.terms=None must be a list, such as \[\{name: \.\.\.\}\] \(in"),
        ("sampling.sde_window_range=4", r"=4 must be a list of 2 whole numbers, such as \[0, 4\] \(in"),
        ("actor.betas=0.9", r"=0\.9 must be a list of 2 numbers, such as \[0\.9, 0\.99\] \(in"),
        ("sampling.sde_type=cpss", r"sampling\.sde_type='cpss' is unknown \(did you mean cps\?"),
        ("sampling.sde_window_range=[0, 2, 4]", r"sampling\.sde_window_range=\[0, 2, 4\] must be a list of 2"),
        ("sampling.sde_window_range=[0, 1.5]", r"sampling\.sde_window_range\[1\]=1\.5 must be a whole number"),
        ("sampling.sde_noise_range=[8, 11]", r"sde_noise_range=\[8, 11\] lies outside the schedule"),
        ("sampling.sde_window_range=[8, 11]", r"sde_window_range=\[8, 11\] lies outside the schedule"),
        ("sampling.sde_window_size=5", r"sde_window_size=5 does not fit"),
        ("rollout.n=1", r"rollout\.n=1 leaves every advantage at 0"),
        ("actor=5", r"actor=5 must be a section of keys: loss_mode, "),
        ("actor=null", r"actor=None must be a section of keys"),
        ("reward.terms=[{weight: 1}]", r"reward\.terms\[0\]\.name is missing"),
        ("reward.terms=[{name: ocr, weigth: 1}]", r"reward\.terms\[0\]\.weigth.*did you mean .*\.weight\?"),
        ("reward.terms=[ocr]", r"reward\.terms\[0\]='ocr' must be a section of keys: name, weight, options"),
        ("reward.terms=[{name: ocr, options: 3}]", r"reward\.terms\[0\]\.options=3 must be a mapping"),
        ("reward.terms=[{name: ocr, options: {1: 2}}]", r"options has the key 1, and its names must be text"),
        ("rollout.worker_resources={1: 2}", r"worker_resources has the key 1, and its names must be text"),
        ("actor.loss_mode=grpo_gard", r"actor\.loss_mode='grpo_gard' is unknown \(did you mean grpo_guard\?"),
        ("actor.loss_mode=nowhere:loss", r"actor\.loss_mode='nowhere:loss'.*no module 'nowhere'"),
        ("trainer.seed", r"override 'trainer.seed' must have the form section\.key=value"),
        ("a." * 3000 + "b=1", "cannot be set"),
        ("model.path=' '", r"model\.path=' ' is blank; name a file or folder"),
        ("data.path=''", r"data\.path='' is blank; name a file or folder"),
        ("data.heldout_path=''", r"data\.heldout_path='' is blank"),
        ("model.lora.warm_start=''", r"model\.lora\.warm_start='' is blank"),
        ("model.lora={rank: 0, warm_start: a}", r"lora\.warm_start='a' is an adapter, and model\.lora\.rank=0 trains"),
        ("rollout.n=1e9", r"rollout\.n=1000000000 is out of range; it must be at most 100000"),
        ("rollout.prompts_per_step=1e9", r"prompts_per_step=1000000000 is out of range"),
        ("model.lora.rank=1e9", r"model\.lora\.rank=1000000000 is out of range; it must be at most 8192"),
        ("model.max_sequence_length=0", r"max_sequence_length=0 is out of range; it must be at least 1"),
        ("model.max_sequence_length=1e9", r"max_sequence_length=1000000000 is out of range; .* most 65536"),
        ("=3", r"override '=3' must have the form"),
        ("data.path=prompts #2.txt", r"data\.path=prompts #2\.txt has a # that begins a comment of YAML; put the"),
        ("data.path=it's #2.txt", r"data\.path=it's #2\.txt has a # that begins a comment of YAML"),
        ("trainer.collective_timeout=1e14", r"collective_timeout=100000000000000\.0 .* at most 1000000000"),
        ("trainer.seed=[1", r"trainer\.seed=\[1 is not valid YAML"),
        ("trainer.seed=${nothing.here}", r"trainer\.seed cannot be resolved: .*nothing\.here"),
        ("trainer.seed=???", r"trainer\.seed cannot be resolved"),
        (f"{SECTION}.rollout_iss=token", r"rollout_iss.* is unknown \(did you mean rollout_is\?"),
        (f"{SECTION}=seq_is", r"='seq_is' must be a section of keys \(did you mean .*\.preset=seq_is\?\): preset, "),
        (f"{SECTION}=false", r"rollout_correction=False must be a section of keys: .*, log_legacy_names \(in"),
        (f"{SECTION}.preset=bypass", r"preset='bypass' is a mode and not a preset; set preset=bypass_ppo_clip,"),
        (f"{SECTION}.preset=decoupled", r"preset='decoupled' is a mode and not a preset; set preset=disabled,"),
        (f"{SECTION}.preset=seq_iss", r"preset='seq_iss' is unknown \(did you mean seq_is\?"),
        (f"{SECTION}.rollout_rs=seq_mean_k4", r"rollout_rs.*seq_mean_k4.*did you mean seq_mean_k"),
        (f"{SECTION}.rollout_rs=seq_mean_k1", r"rollout_rs.*threshold"),
        (f"{SECTION}.loss_type=reinforce", r"loss_type='reinforce' needs bypass_mode"),
        (f"{SECTION}={{rollout_is: token, rollout_is_threshold: null}}", r"rollout_is_threshold is null"),
        (f"{SECTION}={{bypass_mode: true, rollout_is_batch_normalize: true, rollout_is: token}}", "whole batch"),
        (f"{SECTION}={{preset: seq_is, rollout_is: token}}", r"contradicts preset='seq_is'"),
        *(
            (f"{SECTION}={{rollout_rs: token_k1, rollout_rs_threshold: {band}}}", r"rollout_rs_threshold")
            for band in ("2.0_0.5", ".nan", "0", "-1", "0.5_x", "[0.5, 1, 2]")
        ),
    ],
)  # fmt: skip
def test_bad_keys_and_values_are_named(bare, override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(bare, [override])
    assert str(caught.value).endswith(f" (in {bare} with {override})")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: {rollout_is: true, rollout_is_threshold: 3.0, rollout_is_level: sequence}",
        "algorithm: {rollout_correction: {rollout_is: true, rollout_is_threshold: 3.0, rollout_is_level: sequence}}",
    ],
    ids=["flat", "section"],
)
def test_older_dialect_is_translated_with_a_warning(recipe, text):
    with pytest.warns(FutureWarning, match="older dialect"):
        config = load(recipe(text))
    assert config.algorithm.rollout_correction == RolloutCorrectionConfig.seq_is(threshold=3.0)
    assert load(recipe(to_yaml(config))) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor: {lr: 1, lr: 2}", r"'lr' is given twice"),
        ("actor:\n  lr: 1\n  epochs: 2\n  lr: 2", r"'lr' is given twice \(line 4, column 3\)"),
        ("actor: [", r"^not valid YAML: .*line 1"),
        ("- 1", r"a recipe must hold sections of keys, and this is a list"),
        ("actor: {lr: '${'}", r"actor\.lr cannot be read|not valid|cannot be"),
        ("? [1, 2]\n: 3", r"^not valid YAML: found unhashable key"),
        ("null: 3", r"cannot be read|is unknown"),
        *((text, r"^the recipe is empty; name at least the model") for text in ("", "# a comment", "{}")),
        (
            "model: {path: '${model.path}'}",
            r"^model\.path cannot be resolved: Recursive interpolation detected \(in",
        ),
        (
            "".join(f"x{index}: '${{x{index + 1}}}${{x{index + 1}}}'\n" for index in range(40)),
            r"^80 interpolations .* are more than the 24 that a recipe may hold; write their values out",
        ),
    ],
)
def test_bad_files_are_named(recipe, text, message):
    path = recipe(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(caught.value).endswith(f" (in {path})")


def test_missing_recipe():
    with pytest.raises(
        ConfigError,
        match=r"recipe='tiny_ocr_lra': no such file \(did you mean tiny_ocr_lora\?\); give a YAML",
    ):
        load("tiny_ocr_lra")
    with pytest.raises(
        ConfigError, match=r"'gone/away\.yaml': no such file; give a YAML file or one of flux2_klein"
    ):
        load("gone/away.yaml")
    for name in ("", "n" * 5000, "/" + "n" * 5000):
        with pytest.raises(ConfigError, match=f"^recipe='{name}': no such file"):
            load(name)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("mine.yml", "mine.yaml"),
        ("mine", "mine.yaml"),
        ("tiny_ocr_lora.yml", "tiny_ocr_lora"),
        ("sd35.yaml", "sd35"),
    ],
)
def test_a_file_beside_the_missing_one_is_named_and_else_a_shipped_recipe(
    tmp_path, monkeypatch, asked, meant
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(ConfigError, match=rf"no such file \(did you mean {meant}"):
        load(asked)


def test_of_a_runs_folder_the_recipe_is_named(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=f"give its recipe, {tmp_path}/config.yaml"):
        load(tmp_path)


def test_the_reason_stands_before_the_recipe_and_its_overrides(bare):
    with pytest.raises(ConfigError) as caught:
        load(bare, ["trainer.seed=0", "actor.lr=\n[1"])
    place = rf"^actor\.lr= \[1 is not valid YAML: .* \(in {bare} with trainer\.seed=0 actor\.lr= \[1\)$"
    assert re.match(place, str(caught.value))
