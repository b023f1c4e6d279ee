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
    ("override", "named"),
    [
        ("actor.lrr=1", r"'actor\.lrr' .*actor\.lr\?"),
        ("actr.lr=1", r"'actr' .*actor\?\).* model, "),
        ("seed=1", r"key='seed' .*trainer\.seed\?\).* model, "),
        ("lr=1e-4", r"key='lr' .* actor\.lr\?"),
        ("n=8", r"key='n' .* rollout\.n\?"),
        ("timeout=60", r"key='timeout' .* rollout\.timeout or reward\.timeout\?"),
        ("rank=8", r"key='rank' .* model\.lora\.rank\?"),
        ("preset=seq_is", r"key='preset' .* algorithm\.rollout_correction\.preset\?"),
        ("weight=2", r"key='weight' .* model, [^(]* \(in"),
        ("actor.lr=fast", r"actor\.lr='fast' "),
        ("actor.lr=true", r"actor\.lr=True "),
        ("actor.lr='1e-4'", r"actor\.lr='1e-4' "),
        ("actor.lr=null", r"actor\.lr=None "),
        ("actor.lr=0", r"actor\.lr=0\.0 .* above 0 "),
        ("actor.lr=.nan", r"actor\.lr=nan "),
        ("actor.clip_ratio=wide", r"actor\.clip_ratio='wide' "),
        (
            "actor.clip_ratio=1e-4,1e-4",
            r"clip_ratio='1e-4,1e-4' .* \[1e-4, 1e-4\] \(in",
        ),
        ("actor.grad_clip=.inf", r"actor\.grad_clip=inf .* above 0 "),
        ("actor.importance_cap=0.9", r"actor\.importance_cap=0\.9 .* 1"),
        ("actor.clip_ratio=0", r"actor\.clip_ratio=0\.0 .* above 0 "),
        ("actor.clip_ratio=[0.1, x]", r"actor\.clip_ratio\[1\]='x' "),
        ("rollout.cache=first_block", r"rollout\.cache: .*caching"),
        ("actor.clip_center=drift", r"key='actor\.clip_center' .* actor\.loss_mode, "),
        ("actor.old_policy=currant", r"actor\.old_policy='currant' .*current\?"),
        ("actor.compile=1", r"actor\.compile=1 "),
        ("actor.compile=off", r"actor\.compile='off' "),
        ("trainer.total_steps=2.5", r"trainer\.total_steps=2\.5 "),
        ("trainer.total_steps=1e400", r"total_steps=1e400 .*YAML: .*1e400 .*float64"),
        ("trainer.seed=1e23", r"seed=1e\+23 .*exponent"),
        ("sampling.noise_level=1e30", r"noise_level=1e\+30 .* 10 "),
        ("sampling.guidance_scale=1e30", r"guidance_scale=1e\+30 .* 1000 "),
        ("sampling.num_inference_steps=1e9", r"num_inference_steps=1000000000 "),
        ("sampling.num_frames=0", r"sampling\.num_frames=0 .* 1 "),
        ("sampling.width=1e6", r"sampling\.width=1000000 .* 16384"),
        ("trainer.total_steps=true", r"trainer\.total_steps=True "),
        ("trainer.total_steps=1_000", r"trainer\.total_steps='1_000' "),
        ("model.path=7", r"model\.path=7 "),
        ("trainer.trackers=wandb", r"trainer\.trackers='wandb' .* \[wandb\]"),
        ("trainer.trackers=wandb, tensorboard", r"trackers='wandb, tensorboard' .* \[wandb, tensorboard\] \(in"),
        ("reward.terms=ocr", r"reward\.terms='ocr' .* \[\{name: ocr\}\] \(in"),
        ("reward.terms=null", r"reward\.terms=None .* \[\{name: \.\.\.\}\] \(in"),
        ("sampling.sde_window_range=4", r"=4 .* 2 .* \[0, 4\] \(in"),
        ("actor.betas=0.9", r"=0\.9 .* 2 .* \[0\.9, 0\.99\] \(in"),
        ("sampling.sde_type=cpss", r"sampling\.sde_type='cpss' .*cps\?"),
        ("sampling.sde_window_range=[0, 2, 4]", r"sampling\.sde_window_range=\[0, 2, 4\] .* 2 "),
        ("sampling.sde_window_range=[0, 1.5]", r"sampling\.sde_window_range\[1\]=1\.5 "),
        ("sampling.sde_noise_range=[8, 11]", r"sde_noise_range=\[8, 11\] "),
        ("sampling.sde_window_range=[8, 11]", r"sde_window_range=\[8, 11\] "),
        ("sampling.sde_window_size=5", r"sde_window_size=5 "),
        ("rollout.n=1", r"rollout\.n=1 .* 0"),
        ("actor=5", r"actor=5 .* loss_mode, "),
        ("actor=null", r"actor=None "),
        ("reward.terms=[{weight: 1}]", r"reward\.terms\[0\]\.name "),
        ("reward.terms=[{name: ocr, weigth: 1}]", r"reward\.terms\[0\]\.weigth.*did you mean .*\.weight\?"),
        ("reward.terms=[ocr]", r"reward\.terms\[0\]='ocr' .* name, weight, options"),
        ("reward.terms=[{name: ocr, options: 3}]", r"reward\.terms\[0\]\.options=3 "),
        ("reward.terms=[{name: ocr, options: {1: 2}}]", r"reward\.terms\[0\]\.options .* key 1, "),
        ("actor.loss_mode=grpo_gard", r"actor\.loss_mode='grpo_gard' .*grpo_guard\?"),
        ("actor.loss_mode=nowhere:loss", r"actor\.loss_mode='nowhere:loss'.*no module 'nowhere'"),
        ("trainer.seed", r"override 'trainer.seed' must have the form section\.key=value"),
        ("a." * 3000 + "b=1", "cannot be set"),
        ("model.path=' '", r"model\.path=' ' "),
        ("data.path=''", r"data\.path='' "),
        ("data.heldout_path=''", r"data\.heldout_path='' "),
        ("model.lora.warm_start=''", r"model\.lora\.warm_start='' "),
        ("model.lora={rank: 0, warm_start: a}", r"lora\.warm_start='a' .*model\.lora\.rank=0 "),
        ("rollout.n=1e9", r"rollout\.n=1000000000 .* 100000"),
        ("rollout.prompts_per_step=1e9", r"prompts_per_step=1000000000 "),
        ("model.lora.rank=1e9", r"model\.lora\.rank=1000000000 .* 8192"),
        ("model.max_sequence_length=0", r"max_sequence_length=0 .* 1"),
        ("model.max_sequence_length=1e9", r"max_sequence_length=1000000000 .* 65536 "),
        ("=3", r"override '=3' must have the form"),
        ("data.path=prompts #2.txt", r"data\.path=prompts #2\.txt .* # .*YAML"),
        ("data.path=it's #2.txt", r"data\.path=it's #2\.txt .* # .*YAML"),
        ("trainer.collective_timeout=1e14", r"collective_timeout=100000000000000\.0 .* 1000000000\.0 "),
        ("trainer.seed=[1", r"trainer\.seed=\[1 .*YAML"),
        ("trainer.seed=${nothing.here}", r"trainer\.seed .*nothing\.here"),
        ("trainer.seed=???", r"trainer\.seed .*resolved: .*mandatory"),
        (f"{SECTION}.rollout_iss=token", r"rollout_iss' .*rollout_is\?"),
        (f"{SECTION}=seq_is", r"='seq_is' .*\.preset=seq_is\?\): preset, "),
        (f"{SECTION}=false", r"rollout_correction=False .*, log_legacy_names \(in"),
        (f"{SECTION}.preset=bypass", r"preset='bypass' .* preset=bypass_ppo_clip,"),
        (f"{SECTION}.preset=decoupled", r"preset='decoupled' .* preset=disabled,"),
        (f"{SECTION}.preset=seq_iss", r"preset='seq_iss' .*seq_is\?"),
        (f"{SECTION}.rollout_rs=seq_mean_k4", r"rollout_rs.*seq_mean_k4.*did you mean seq_mean_k"),
        (f"{SECTION}.rollout_rs=seq_mean_k1", "rollout_rs_threshold .*missing .*rollout_rs='seq_mean_k1'"),
        (f"{SECTION}.loss_type=reinforce", r"loss_type='reinforce' .*bypass_mode"),
        (f"{SECTION}={{rollout_is: token, rollout_is_threshold: null}}", r"rollout_is_threshold .*null"),
        (f"{SECTION}={{bypass_mode: true, rollout_is_batch_normalize: true, rollout_is: token}}", "normalize=True "),
        (f"{SECTION}={{preset: seq_is, rollout_is: token}}", "rollout_is='token' .*preset='seq_is'"),
        *(
            (f"{SECTION}={{rollout_rs: token_k1, rollout_rs_threshold: {band}}}", "rollout_rs_threshold=")
            for band in ("2.0_0.5", ".nan", "0", "-1", "0.5_x", "[0.5, 1, 2]")
        ),
    ],
)  # fmt: skip
def test_bad_keys_and_values_are_named(bare, override, named):
    with pytest.raises(ConfigError, match=named) as caught:
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
    ("text", "named"),
    [
        ("actor: {lr: 1, lr: 2}", r"'lr' .*\(line 1, column 16\)"),
        ("actor:\n  lr: 1\n  epochs: 2\n  lr: 2", r"'lr' .*\(line 4, column 3\)"),
        ("actor: [", r"^not valid YAML: .*line 1, column 9"),
        ("- 1", "recipe .* list"),
        ("actor: {lr: '${'}", r"^actor\.lr .*\$\{"),
        ("? [1, 2]\n: 3", r"^not valid YAML: .* key \(line 1, column 3\)"),
        ("null: 3", "key .*NoneType"),
        *((text, r"^the recipe .* model: \{path: ") for text in ("", "# a comment", "{}")),
        (
            "model: {path: '${model.path}'}",
            r"^model\.path .*Recursive interpolation",
        ),
        (
            "".join(f"x{index}: '${{x{index + 1}}}${{x{index + 1}}}'\n" for index in range(40)),
            "^80 interpolations .* 24 ",
        ),
    ],
)
def test_bad_files_are_named(recipe, text, named):
    path = recipe(text)
    with pytest.raises(ConfigError, match=named) as caught:
        load(path)
    assert str(caught.value).endswith(f" (in {path})")


@pytest.mark.parametrize("name", ["gone/away.yaml", "", "n" * 5000, "/" + "n" * 5000], ids=len)
def test_a_recipe_that_is_missing_is_named_with_those_that_are_shipped(name):
    with pytest.raises(ConfigError, match=f"^recipe='{name}': .* flux2_klein_pickscore_lora, "):
        load(name)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("tiny_ocr_lra", "tiny_ocr_lora"),
        ("mine.yml", "mine.yaml"),
        ("mine", "mine.yaml"),
        ("tiny_ocr_lora.yml", "tiny_ocr_lora"),
        ("sd35.yaml", "sd35_medium_ocr_lora"),
    ],
)
def test_a_file_beside_the_missing_one_is_named_and_else_a_shipped_recipe(
    tmp_path, monkeypatch, asked, meant
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(ConfigError, match=rf"^recipe='{asked}': .* {meant}\?\)"):
        load(asked)


def test_of_a_runs_folder_the_recipe_is_named(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=f"^recipe='{tmp_path}' .* {tmp_path}/config.yaml$"):
        load(tmp_path)


def test_the_reason_stands_before_the_recipe_and_its_overrides(bare):
    with pytest.raises(ConfigError) as caught:
        load(bare, ["trainer.seed=0", "actor.lr=\n[1"])
    place = rf"^actor\.lr= \[1 is not valid YAML: .* \(in {bare} with trainer\.seed=0 actor\.lr= \[1\)$"
    assert re.match(place, str(caught.value))
