"""The JSON schema of recipes, held against recipes by a validator of its own."""

import json

import pytest
import yaml
from jsonschema import Draft202012Validator

from flowcorr.cli import main
from flowcorr.config import find_recipe, load, recipe_names, to_yaml
from flowcorr.instruments.reference.keys import keys
from flowcorr.instruments.reference.schema import recipe_schema


@pytest.fixture(scope="module")
def validator():
    Draft202012Validator.check_schema(recipe_schema())
    return Draft202012Validator(recipe_schema())


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_fit_as_they_are_and_with_every_key(validator, name):
    for text in (find_recipe(name).read_text(encoding="utf-8"), to_yaml(load(name))):
        assert [error.message for error in validator.iter_errors(yaml.safe_load(text))] == []


@pytest.mark.parametrize(
    ("recipe", "place"),
    [
        ({"actor": {"learning_rate": 1e-4}}, "actor"),
        ({"actor": {"epochs": 1.5}}, "actor.epochs"),
        ({"actor": {"loss_options": [1]}}, "actor.loss_options"),
        ({"sampling": {"sde_type": "ode"}}, "sampling.sde_type"),
        ({"sampling": {"sde_window_range": [0, 4, 8]}}, "sampling.sde_window_range"),
        ({"reward": {"terms": [{"weight": 1.0}]}}, "reward.terms.0"),
        ({"algorithm": {"rollout_correction": {"preset": "seq_iss"}}}, "algorithm.rollout_correction"),
        ({"trainer": {"device": 3}}, "trainer.device"),
    ],
)
def test_mistakes_are_marked_where_they_stand(validator, recipe, place):
    places = [".".join(map(str, error.absolute_path)) for error in validator.iter_errors(recipe)]
    assert places == [place]


@pytest.mark.parametrize(
    "recipe",
    [
        {"sampling": {"height": "${sampling.width}"}},
        {"algorithm": {"rollout_correction": None}},
        {"algorithm": {"rollout_is_level": "sequence"}},
        {"algorithm": {"rollout_correction": {"bypass_mode": "auto", "log_ratio_scale": "sum"}}},
        {"actor": {"clip_ratio": [1e-4, 2e-4]}},
    ],
)
def test_what_recipes_may_also_say(validator, recipe):
    assert list(validator.iter_errors(recipe)) == []


def test_every_key_is_explained_as_explain_explains_it():
    schema = recipe_schema()
    for key in keys():
        part = schema
        for name in key.name.split("."):
            part = part["properties"] if "properties" in part else _section(part)["properties"]
            part = part[name.removesuffix("[]")]
            part = part["items"] if name.endswith("[]") else part
        assert part.get("description", "") == key.meaning


def _section(part):
    """The section among the choices of an optional one."""
    return next(choice for choice in part["anyOf"] if "properties" in choice)


def test_the_command_prints_it(capsys):
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == recipe_schema()


@pytest.mark.parametrize("words", [[], ["tiny_ocr_lora", "--schema"]])
def test_the_command_wants_a_recipe_or_the_schema(capsys, words):
    assert main(["config", *words]) == 2
    assert "takes a recipe, or `--schema`" in capsys.readouterr().err
