"""YAML as recipes mean it."""

import contextlib
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr.config import load, load_mapping, to_yaml
from flowcorr.config.yaml_text import dump, has_comment, parse, parse_older
from flowcorr.errors import ConfigError

BOMB = "a0: &a0 [1, 1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
TOO_MUCH = ".* 20000 values, or 50 levels"


@settings(max_examples=40)
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


@pytest.mark.parametrize("read", [parse, parse_older])
@pytest.mark.parametrize(
    "text", ["a \U0001f600", "\ud83d", "\\ud83d\\ude00"], ids=["emoji", "half", "backslashes"]
)
def test_text_of_json_is_read_as_json_reads_it(read, text):
    assert read(json.dumps({text: [text]})) == {text: [text]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, TOO_MUCH),
        ("a: &a [*a]", TOO_MUCH),
        ("a: &a {b: [1, *a]}", TOO_MUCH),
        ("[" * 60 + "]" * 60, TOO_MUCH),
        ("[" * 3000 + "]" * 3000, TOO_MUCH),
        ("[" * 10**4, TOO_MUCH),
        ("{a: " * 10**4, TOO_MUCH),
        ("[" + "1, " * 20_000 + "]", TOO_MUCH),
        ("9" * 5000, r".* 99999999999999999999\.\.\. .* 19 digits"),
        ("1e400", ".* 1e400 .*float64"),
        ("-1e-400", ".* -1e-400 .*float64"),
        ("{a: 1, a: 2}", r"the key 'a' .*\(line 1, column 8\)$"),
        *((f"!!{tag} one", rf".* tag:yaml\.org,2002:{tag} ") for tag in ("int", "bool", "timestamp")),
        ("!!python/object/apply:os.system [id]", r".* tag:.*os\.system "),
        ("a: 1\n---\nb: 2", r".*document \(line 2, column 1\)"),
        ("a\x00", ".*character #x0000"),
    ],
)
def test_what_no_configuration_needs_is_refused_with_its_place(text, problem):
    with pytest.raises(ConfigError, match=f"^not valid YAML: {problem}"):
        parse(text)


def test_merges_do_not_grow():
    text = "a0: &a0 {b: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60))
    with contextlib.suppress(ConfigError):  # PyYAML before 6.0.4
        assert parse_older(text)["a59"] == {"b": 1}


def test_aliases_and_numbers_within_bounds_are_read():
    assert parse("a: &a [1, {b: 2}]\nb: [*a, *a]")["b"] == [[1, {"b": 2}]] * 2
    assert parse("[0.0, -0e9, .inf, 9223372036854775807]") == [0.0, 0.0, math.inf, 2**63 - 1]
    assert parse("[.Inf, -.INF, +.inf]") == [math.inf, -math.inf, math.inf]
    assert all(map(math.isnan, parse("[.nan, .NaN, .NAN]")))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it's #2", True),
        ("{a: [1]} # b", True),
        ("#2", True),
        ("'a #2'", False),
        ('"a" ', False),
        ("a#2", False),
        ("", False),
    ],
)
def test_a_comment_behind_a_value_is_found(text, found):
    assert has_comment(text) is found


def test_lists_of_scalars_are_written_on_one_line():
    assert dump({"b": [1, 2], "a": [{"x": 0.5}]}) == "b: [1, 2]\na:\n- x: 0.5\n"
