"""Configurations of other trainers become recipes that load."""

import pytest
import yaml

from flowcorr.cli import main
from flowcorr.config import find_recipe, recipe_names
from flowcorr.errors import ConfigError
from flowcorr.translate import translate
from tests.translate.configs import OMNI, SCRIPT, factory_yaml, loaded


def saved(**changes):
    """A configuration of verl-omni as Hydra saves it, with what only its program could resolve left out."""
    flat = {
        "data.train_batch_size": 4,
        "data.train_files": "data/train.parquet",
        "data.val_files": "data/test.parquet",
        "trainer.total_training_steps": 10,
        "reward.custom_reward_function.path": "score/hps.py",
        f"{OMNI}model.path": "a/sd3",
        f"{OMNI}model.algorithm": "grpo_guard",
        f"{OMNI}model.external": "${missing.key}",
        f"{OMNI}model.lora_rank": 8,
        f"{OMNI}model.lora_dtype": "fp32",
        f"{OMNI}model.target_modules": ["to_q"],
        f"{OMNI}actor.diffusion_loss.loss_mode": "${oc.select:actor_rollout_ref.model.algorithm,flow_grpo}",
        f"{OMNI}actor.diffusion_loss.clip_ratio": 1e-4,
        f"{OMNI}actor.optim.lr": 1e-4,
        f"{OMNI}actor.ppo_mini_batch_size": 4,
        f"{OMNI}rollout.name": "vllm_omni",
        f"{OMNI}rollout.n": 1,
        f"{OMNI}rollout.dtype": "bfloat16",
        f"{OMNI}rollout.load_format": "???",
        f"{OMNI}rollout.algo.noise_level": 0.7,
        **{f"{OMNI}rollout.pipeline.{key}": 512 for key in ("height", "width")},
        f"{OMNI}rollout.pipeline.num_inference_steps": 10,
        "unheard_of": 1,
        **changes,
    }
    tree = {"defaults": ["_self_"]}
    for key, value in flat.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return yaml.safe_dump(tree)


def test_a_hydra_yaml_with_interpolation(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(saved(), encoding="utf-8")
    text = translate(str(path), [f"{OMNI}rollout.n=4"])
    found = loaded(tmp_path, text)
    assert (found.actor.loss_mode, found.rollout.n, found.actor.mini_batches) == ("grpo_guard", 4, 1)
    assert found.reward.terms[0].name == "my_rewards:hps"
    assert "# unknown to flowcorr translate:\n#   unheard_of=1" in text


LANGUAGE = {
    "actor_rollout_ref": {"model": {"path": "deepseek-llm-7b-chat"}, "rollout": {"n": 5, "name": "vllm"}}
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello: world", r"it holds no key of verl-omni or Flow-Factory \(it has: hello\)"),
        ("", "^it is no configuration of a trainer: that holds sections of keys"),
        ("- 1", "^it is no configuration of a trainer"),
        (
            "a: &a [*a]",
            r"^not valid YAML: the alias \*a contains itself \(line 1, column 8\) \(.*some.yaml cannot be tr",
        ),
        (
            "data: {train_files: a.parquet}",
            r"^it is no configuration of verl-omni's diffusion trainer, which would",
        ),
        (
            yaml.safe_dump({"data": {"train_batch_size": 1024}, **LANGUAGE}),
            r"^it is no configuration of verl-omni's diffusion trainer, which would hold "
            r"actor_rollout_ref\.model\.lora_rank, .*, \.\.\. \(",
        ),
        (
            saved(**{f"{OMNI}model.path": "deepseek-llm-7b-chat", f"{OMNI}rollout.n": 4}),
            r"^actor_rollout_ref\.model\.path=deepseek-llm-7b-chat names no model of the families that flowcorr knows",
        ),
        (
            saved(**{f"{OMNI}rollout.n": "${oc.env:N}"}),
            r"^actor_rollout_ref\.rollout\.n is not known: .*env:N",
        ),
        (
            saved(**{f"{OMNI}rollout.name": "???"}),
            r"^actor_rollout_ref\.rollout\.name is not known: .* has no value",
        ),
        (saved(defaults=[{"actor": "dp"}]), "^it takes values from other files by its list defaults"),
        (
            "trainer: {seed: 1}\nmodel: {path: a/sd3}",
            "it is a flowcorr recipe already; flowcorr train takes it",
        ),
        (
            "model: {model_name_or_path: a/sd3}\ntrain: {group_size: 24}",
            "^it is no configuration of Flow-Factory, which would hold model.model_type, train.trainer_type",
        ),
    ],
)
def test_a_yaml_of_something_else_is_never_filled_with_defaults(tmp_path, text, message):
    path = tmp_path / "some.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        translate(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "torchrun fastvideo/train_grpo_flux.py --mix_grpo",
            "^line 1: it starts .* of MixGRPO, whose configuration",
        ),
        ("torchrun fastvideo/train_grpo_flux.py", "^line 1: it starts .* of DanceGRPO, whose configuration"),
        ("bash other.sh data.seed=1", r"^none of its commands runs python -m verl_omni\.trainer\.main_"),
        (
            "python3 -m verl_omni.trainer.main_omni",
            r"^verl_omni\.trainer\.main_omni trains no diffusion model",
        ),
        ("", r"^none of its commands runs python -m verl_omni\.trainer\.main_"),
    ],
)
def test_a_script_of_another_trainer_is_refused_by_its_name(tmp_path, text, message):
    path = tmp_path / "run.sh"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        translate(str(path))


def test_the_home_folder_and_the_current_one(omni):
    folders = (
        "data.train_files=$HOME/a.parquet",
        "data.val_files=$PWD/b.parquet",
        f"{OMNI}model.path=~/Qwen-Image",
    )
    found, text = omni(*folders)
    assert (found.data.path, found.data.heldout_path) == ("~/a.txt", "./b.txt")
    assert found.model.path == "~/Qwen-Image"
    assert "may change what is above" not in text


def test_a_script_that_goes_elsewhere_says_so(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("cd $HOME/runs\n" + SCRIPT.format(""), encoding="utf-8")
    assert "# not read, and may change what is above:\n#   line 1: cd ~/runs\n" in translate(str(script))
    script.write_text("cd x\n" + SCRIPT.format("data.train_files=$PWD/a.parquet"), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"^data\.train_files is not known: line 1: only a shell could tell"
    ):
        translate(str(script))


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "$HOME${oc.env:HOME}/x"])
def test_no_variable_of_the_environment_reaches_a_recipe(grpo, tmp_path, text):
    """Neither when a source is translated, nor when the recipe is loaded."""
    grpo.write_text(grpo.read_text().replace("dataset/ocr", text), encoding="utf-8")
    assert loaded(tmp_path, translate(f"{grpo}:get")).data.path == f"{text}/train.txt"
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(f"{OMNI}model.path='{text}'"), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=rf"^{OMNI}model\.path is not known: .* does not follow from the file"
    ):
        translate(str(script))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "data.seed=$((9**9**9))",
            r"^data\.seed is not known: line 14: `\$\(\(9\*\*9\*\*9\)\)` is not arithmetic",
        ),
        (
            'data.seed="\\',
            r"^line 14: a quote or a parenthesis is not closed \(.*run\.sh cannot be translated\)$",
        ),
        (
            "--config-name=other",
            "^the argument '--config-name=other' chooses other defaults, which are not read",
        ),
        (
            "$EXTRA",
            r"^the argument '\$EXTRA' is not read, only key=value \(line 14: the script does not assign \$EXTRA",
        ),
    ],
)
def test_a_script_that_cannot_be_read_is_refused_with_its_line(tmp_path, lines, message):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        translate(str(script))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.custom_reward_function.reward_kwargs=3", r"reward_kwargs=3 must be a section"),
        (
            "reward.reward_functions=[1] +reward.reward_functions.a.path=b",
            r"^reward\.reward_functions\.a\.path=b lies in reward\.reward_functions, which is no section of keys; give",
        ),
    ],
)
def test_values_that_no_run_can_have(tmp_path, override, message):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(override), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        translate(str(script))


def test_overrides_are_for_every_source_and_gpus_for_one(grpo, tmp_path):
    found = loaded(tmp_path, translate(f"{grpo}:get", ["config.sample.num_steps=12", "train.beta=0"], gpus=2))
    assert (found.sampling.num_inference_steps, found.actor.kl_coef, found.rollout.prompts_per_step) == (
        12,
        0,
        8,
    )
    with pytest.raises(ConfigError, match="^gpus=0 must be at least 1"):
        translate(f"{grpo}:get", gpus=0)
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(""), encoding="utf-8")
    with pytest.raises(ConfigError, match="^--gpus 2 belongs to a file of flow_grpo"):
        translate(str(script), gpus=2)


def test_an_override_may_be_of_a_whole_section(grpo, omni_script, tmp_path):
    found = loaded(
        tmp_path,
        translate(omni_script, [f"{OMNI}rollout.algo={{noise_level: 0.1, sde_window_size: 4}}"]),
    )
    assert (found.sampling.noise_level, found.sampling.sde_window_size) == (0.1, 4)
    assert found.sampling.sde_window_range == (0, 5)  # as in the script
    path = tmp_path / "factory.yaml"
    path.write_text(factory_yaml(), encoding="utf-8")
    found = loaded(tmp_path, translate(str(path), ["train={group_size: 12}"]))
    assert (found.rollout.n, found.sampling.height) == (12, 512)
    found = loaded(tmp_path, translate(f"{grpo}:get", ["config.sample={noise_level: 0.9}"]))
    assert (found.sampling.noise_level, found.sampling.num_inference_steps) == (0.9, 10)


@pytest.mark.parametrize(
    ("override", "terms"),
    [
        ("reward_fn.pickscore=0.25", [("pickscore", 0.25), ("my_rewards:geneval", 0.5)]),
        ("config.reward_fn.ocr=2", [("pickscore", 1), ("my_rewards:geneval", 0.5), ("ocr", 2)]),
        ("config.reward_fn={ocr: 2}", [("ocr", 2)]),
    ],
)
def test_an_override_may_be_of_one_reward(grpo, tmp_path, override, terms):
    found = loaded(tmp_path, translate(f"{grpo}:get", [override]))
    assert [(term.name, term.weight) for term in found.reward.terms] == terms


@pytest.mark.parametrize(
    "override",
    [
        "reward.reward_functions.jpeg.weight=3",
        "reward.reward_functions.jpeg={weight: 3}",
        "reward.reward_functions={jpeg: {weight: 3}}",
    ],
)
def test_an_override_of_a_reward_counts_beside_the_scripts_own(tmp_path, override):
    functions = "+reward.reward_functions.jpeg"
    script = tmp_path / "run.sh"
    words = (
        "reward.reward_manager.name=MultiVisualRewardManager",
        f"{functions}.path=verl_omni/jpeg_compressibility.py",
        f"{functions}.weight=1.0",
    )
    script.write_text(SCRIPT.format(" ".join(words)), encoding="utf-8")
    (term,) = loaded(tmp_path, translate(str(script), [override])).reward.terms
    assert (term.name, term.weight) == ("jpeg_compressibility", 3 / 500)


def test_an_override_of_an_entry_of_a_list_is_refused(tmp_path):
    path = tmp_path / "factory.yaml"
    path.write_text(factory_yaml(), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"^rewards\.weight=2 lies in rewards, which is no section of keys; give"
    ):
        translate(str(path), ["rewards.weight=2"])


@pytest.mark.parametrize(
    "override", ["reward.reward_manager.nam=x", f"{OMNI}rollout.nn=4", "unheard.of=1", "critic={lr: 1}"]
)
def test_an_override_without_a_line_is_a_warning(omni_script, override):
    key = override.partition("=")[0]
    with pytest.warns(
        UserWarning, match=rf"^no line of the recipe follows from {key}\.?.*=.*; check the key"
    ):
        translate(omni_script, [override])


def test_words_of_a_script_without_a_line_are_no_warning(omni):
    assert "#   unheard.of=1" in omni("unheard.of=1")[1]


def test_a_recipe_that_would_not_load_is_refused(grpo):
    grpo.write_text(grpo.read_text().replace("resolution = 512", "resolution = 0"), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"^the recipe that it becomes cannot be loaded: sampling\.height=0 is out"
    ):
        translate(f"{grpo}:get")


@pytest.mark.parametrize("name", ["", "n" * 5000, "/", "a/b.py:get"])
def test_a_source_that_is_not_there(name):
    with pytest.raises(ConfigError, match=": no such file; give a shell script"):
        translate(name)


def test_every_shipped_recipe_is_a_recipe_already():
    for name in recipe_names():
        with pytest.raises(ConfigError, match="is a flowcorr recipe already"):
            translate(str(find_recipe(name)))


@pytest.mark.filterwarnings("default:no line of the recipe follows")
def test_the_command_shows_its_warnings(omni_script, capsys):
    assert main(["translate", omni_script, f"{OMNI}rollout.nn=4"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(
        f"flowcorr: warning: no line of the recipe follows from {OMNI}rollout.nn=4; check"
    )
    assert captured.err.count("\n") == 1
    assert captured.out.startswith("# Translated")


def test_the_command(grpo, tmp_path, capsys):
    assert main(["translate", f"{grpo}:get"]) == 0
    assert capsys.readouterr().out.startswith(
        "# Translated by flowcorr translate from grpo.py:get (flow_grpo, as scripts/train_sd3.py runs it)."
    )
    for source, message in (
        (str(grpo), "choose one of its configurations, as"),
        (str(tmp_path / "none.sh"), "no such file"),
        (f"{grpo}:got", "did you mean get"),
    ):
        assert main(["translate", source]) == 2
        assert message in capsys.readouterr().err


def test_a_section_may_be_overridden_with_nothing(tmp_path):
    script = tmp_path / "run.sh"
    words = "+reward.reward_functions.jpeg.path=verl_omni/jpeg.py +reward.reward_functions.jpeg.weight=1.0"
    script.write_text(SCRIPT.format(words), encoding="utf-8")
    plain = tmp_path / "plain.sh"
    plain.write_text(SCRIPT.format(""), encoding="utf-8")
    found = loaded(tmp_path, translate(str(script), ["reward.reward_functions=null"]))
    assert found.reward == loaded(tmp_path, translate(str(plain))).reward
