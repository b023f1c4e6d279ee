"""Configurations of other trainers become recipes that load."""

import pytest
import yaml

from flowcorr.cli import main
from flowcorr.config import find_recipe, recipe_names
from flowcorr.errors import ConfigError
from flowcorr.translate import translate
from tests.translate.configs import OMNI, SCRIPT, loaded


def test_a_hydra_yaml_with_interpolation(tmp_path):
    """As Hydra saves it, with what only its program could resolve left out."""
    values = {
        "defaults": ["_self_"],
        "actor_rollout_ref": {
            "model": {"path": "a/sd3", "algorithm": "grpo_guard", "external": "${missing.key}"},
            "actor": {
                "diffusion_loss": {"loss_mode": "${oc.select:actor_rollout_ref.model.algorithm,flow_grpo}"},
                "ppo_mini_batch_size": 4,
            },
            "rollout": {"n": 1, "load_format": "???"},
        },
        "data": {"train_batch_size": 4},
        "reward": {"reward_functions": {"ocr": {"path": "ocr.py", "weight": 2.0}}},
        "unheard_of": 1,
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    text = translate(str(path), [f"{OMNI}rollout.n=4"])
    found = loaded(tmp_path, text)
    assert (found.actor.loss_mode, found.rollout.n, found.actor.mini_batches) == ("grpo_guard", 4, 1)
    assert found.reward.terms[0].weight == 2
    assert "# unknown to flowcorr translate:\n#   unheard_of=1" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello: world", r"it holds no key of verl-omni \(it has: hello\)"),
        ("", "^it is not a Hydra YAML"),
        (
            "a: &a [*a]",
            r"^not valid YAML: the alias \*a contains itself \(line 1, column 8\) \(.*some.yaml cannot be tr",
        ),
        (
            "actor_rollout_ref: {rollout: {n: '${oc.env:N}'}}",
            r"^actor_rollout_ref\.rollout\.n is not known: .*env:N",
        ),
        (
            "trainer: {seed: 1}\nmodel: {path: a/sd3}",
            "it is a flowcorr recipe already; flowcorr train takes it",
        ),
    ],
)
def test_a_yaml_that_is_not_of_verl_omni(tmp_path, text, message):
    path = tmp_path / "some.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        translate(str(path))


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
            r"^data\.seed is not known: line 11: `\$\(\(9\*\*9\*\*9\)\)` is not arithmetic",
        ),
        (
            'data.seed="\\',
            r"^line 11: a quote or a parenthesis is not closed \(.*run\.sh cannot be translated\)$",
        ),
        ("--config-name=other", "^the argument '--config-name=other' is not read, only key=value"),
        (
            "$EXTRA",
            r"^the argument '\$EXTRA' is not read, only key=value \(line 11: the script does not assign \$EXTRA",
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
        ("reward.reward_functions=3", r"^reward\.reward_functions=3 must be a section of keys"),
        ("reward.reward_functions.a=3", r"^reward\.reward_functions\.a=3 must be a section of keys"),
        ("data.train_files=[a,b]", r"^data\.train_files=\['a', 'b'\] must be one file"),
        (f"{OMNI}actor.ppo_mini_batch_size=0", r"ppo_mini_batch_size=0 must be at least 1"),
        (f"{OMNI}rollout.algo.sde_window_range=[1]", r"sde_window_range=\[1\] must be a list of 2 numbers"),
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


def test_the_command(grpo, tmp_path, capsys):
    assert main(["translate", f"{grpo}:get"]) == 0
    assert capsys.readouterr().out.startswith(
        "# Translated by flowcorr translate from grpo.py:get (flow_grpo)."
    )
    for source, message in (
        (str(grpo), "choose one of its configurations, as"),
        (str(tmp_path / "none.sh"), "no such file"),
        (f"{grpo}:got", "did you mean get"),
    ):
        assert main(["translate", source]) == 2
        assert message in capsys.readouterr().err
