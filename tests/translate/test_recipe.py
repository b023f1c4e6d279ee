"""The text of a translated recipe."""

import pytest
import yaml

from flowcorr.config.yaml_text import parse
from flowcorr.translate.recipe import recipe_text
from flowcorr.translate.table import Line, Translation


def text_of(values, *, all_keys=False, **parts):
    lines = {key: Line(value=value, comment="there") for key, value in values.items()}
    empty = {"sources": set(), "left": {}, "without_effect": [], "differences": ()}
    return recipe_text(Translation(lines=lines, **{**empty, **parts}), "run.sh (other)", all_keys=all_keys)


def test_every_value_reads_back_as_it_was():
    values = {
        "a.b.text": "off",
        "a.b.band": "0.5_2",
        "a.n": 3,
        "a.none": None,
        "c.list": [1, 2.5],
        "c.path": "~/x",
    }
    text = text_of(values)
    assert text.startswith("# Translated by flowcorr translate from run.sh (other).\n")
    assert yaml.safe_load(text) == {
        "a": {"b": {"text": "off", "band": "0.5_2"}, "n": 3, "none": None},
        "c": {"list": [1, 2.5], "path": "~/x"},
    }
    assert text.count("  # there\n") == len(values)


@pytest.mark.parametrize(
    "value",
    ["{a}", "a:", "a: b", "a #b", "~", "???", "a\nb", "\x07", "0.5_2", "[", "\u00fc", "\U0001f600", "-x", ""],
)
def test_text_that_yaml_would_read_as_something_else_is_quoted(value):
    assert parse(text_of({"a": value})) == {"a": value}


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "x\\${a.b}", "$HOME"])
def test_text_that_looks_like_an_interpolation_is_escaped(value):
    from omegaconf import OmegaConf

    text = text_of({"a": {"b": value}, "c": [value]})
    assert OmegaConf.to_container(OmegaConf.create(text), resolve=True) == {"a": {"b": value}, "c": [value]}


def test_comments_stay_comments():
    text = text_of({}, left={"why": ["x=a\nb: 1", "y=\x00\x85\u2028c"]})
    assert "#   x=a b: 1\n#   y=? c\n" in text
    assert parse(text) is None


def test_every_key_stands_in_a_comment():
    parts = {
        "left": {
            "no such thing": ["x=1"],
            "unknown to flowcorr translate": [f"key{index}=1" for index in range(40)],
        },
        "without_effect": ["a.b.c=1", "a.b.d=2", "e=3"],
        "differences": ["the std, " * 20 + "at last"],
    }
    text = text_of({}, **parts)
    assert "# not carried over (no such thing):\n#   x=1\n" in text
    assert "# not carried over (unknown to flowcorr translate):\n#   key0=1\n" in text
    assert "#   key39=1\n" in text
    assert "evaluations here: 3 keys\n# (a.b 2, top level 1; --all lists them)\n" in text
    assert "# differs in any case:\n#   the std, " in text
    assert text.endswith("at last\n")
    assert "evaluations here:\n#   a.b.c=1\n#   a.b.d=2\n#   e=3\n" in text_of({}, all_keys=True, **parts)


def test_a_long_value_is_cut_and_a_secret_is_not_written():
    text = text_of({}, left={"why": ["key=" + "x" * 1000, "env.WANDB_API_KEY=abc123"]})
    assert max(map(len, text.splitlines())) < 120
    assert "env.WANDB_API_KEY=***" in text
