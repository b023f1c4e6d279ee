"""The text of a translated recipe."""

import pytest
import yaml

from flowcorr.config.yaml_text import parse
from flowcorr.translate.recipe import recipe_text
from flowcorr.translate.table import Line, Translation


def text_of(values, **parts):
    lines = {key: Line(value=value, comment="there") for key, value in values.items()}
    empty = {"sources": set(), "no_line": [], "no_place": {}, "unknown": [], "differences": ()}
    return recipe_text(Translation(lines=lines, **{**empty, **parts}), "run.sh (other)")


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
    "value", ["{a}", "a:", "a: b", "a #b", "~", "???", "a\nb", "\x07", "0.5_2", "[", "\u00fc", "-x", ""]
)
def test_text_that_yaml_would_read_as_something_else_is_quoted(value):
    assert parse(text_of({"a": value})) == {"a": value}


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "x\\${a.b}", "$HOME"])
def test_text_that_looks_like_an_interpolation_is_escaped(value):
    from omegaconf import OmegaConf

    text = text_of({"a": {"b": value}, "c": [value]})
    assert OmegaConf.to_container(OmegaConf.create(text), resolve=True) == {"a": {"b": value}, "c": [value]}


def test_comments_stay_comments():
    text = text_of({}, unknown=["x=a\nb: 1", "y=\x00\x85\u2028c"])
    assert "#   x=a b: 1\n#   y=? c\n" in text
    assert parse(text) is None


def test_what_is_not_read_is_listed():
    translation = Translation(lines={}, sources=set(), no_line=(), no_place={}, unknown=(), differences=())
    text = recipe_text(translation, "a\nb.sh", ["line 1: source env.sh"])
    assert text.startswith("# Translated by flowcorr translate from a b.sh.\n")
    assert "# not read, and may change what is above:\n#   line 1: source env.sh\n" in text


def test_every_key_stands_in_a_comment():
    text = text_of(
        {},
        no_line=["z=0"],
        no_place={"no such thing": ["x=1"]},
        unknown=[f"key{index}=1" for index in range(40)],
        differences=["the std, " * 20 + "at last"],
    )
    assert "# as here anyway, or without effect beside other keys:\n#   z=0\n" in text
    assert "# no equivalent here (no such thing):\n#   x=1\n" in text
    assert "# unknown to flowcorr translate:\n#   key0=1\n" in text
    assert "#   key39=1\n" in text
    assert "# differs in any case:\n#   the std, " in text
    assert text.endswith("at last\n")


def test_a_long_value_is_cut():
    text = text_of({}, unknown=["key=" + "x" * 1000])
    assert len(text.splitlines()[-2]) < 120
