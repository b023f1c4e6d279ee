"""Configurations of other trainers become recipes that load."""

import pytest
import yaml

from flowcorr.cli import main
from flowcorr.config import find_recipe, recipe_names
from flowcorr.errors import ConfigError
from flowcorr.translate import translate
from tests.translate.configs import OMNI, loaded


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
            "rollout": {"n": 1, "name": "???"},
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
        ("", r"it holds no key of verl-omni \(it has: nothing\)"),
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
