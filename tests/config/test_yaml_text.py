"""YAML as recipes mean it."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flowcorr.config import load, load_mapping, to_yaml
from flowcorr.config.yaml_text import dump, parse


@given(text=st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc"))))
def test_any_text_round_trips(text, tmp_path_factory):
    config = load_mapping({"sampling": {"negative_prompt": text, "guidance_scale": 2}})
    path = tmp_path_factory.mktemp("round_trip") / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(path) == config


@pytest.mark.parametrize(
    "text", ["0.5_2", "1e-4", "off", "1:30", "010", "true", "${trainer.seed}", "a \\${b}", "~", ""]
)
def test_text_that_looks_like_something_else_round_trips(recipe, text):
    config = load_mapping({"sampling": {"negative_prompt": text, "guidance_scale": 2}})
    assert load(recipe(to_yaml(config))).sampling.negative_prompt == text


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5_2", "0.5_2"), ("1:30", "1:30"), ("off", "off"), ("1e-4", 1e-4), ("010", "010"), ("~", None)],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = parse(text)
    assert found == value
    assert type(found) is type(value)


def test_a_key_is_given_once():
    with pytest.raises(yaml.YAMLError, match="'a' is given twice"):
        parse("{a: 1, a: 2}")


def test_lists_of_scalars_are_written_on_one_line():
    assert dump({"b": [1, 2], "a": [{"x": 0.5}]}) == "b: [1, 2]\na:\n- x: 0.5\n"


@pytest.mark.parametrize(
    "text", ["!!int one", "!!bool maybe", "!!timestamp soon", "1" * 5000, "[" * 10**4, "{a: " * 10**4]
)
def test_what_cannot_be_read_is_an_error_of_yaml(text):
    with pytest.raises(yaml.YAMLError):
        parse(text)
