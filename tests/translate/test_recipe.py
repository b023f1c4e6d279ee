"""The text of a translated recipe."""

import yaml

from flowcorr.translate.recipe import recipe_text
from flowcorr.translate.table import Line, Translation


def text_of(values, **parts):
    lines = {key: Line(value=value, comment="there") for key, value in values.items()}
    empty = {"no_place": {}, "unknown": [], "differences": ()}
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


def test_what_has_no_place_stands_in_comments():
    text = text_of({}, no_place={"no such thing": ["x=1"]}, unknown=["y=2"], differences=["the std"])
    assert "# no equivalent here (no such thing):\n#   x=1\n" in text
    assert "# unknown to flowcorr translate:\n#   y=2\n" in text
    assert text.endswith("# differs in any case:\n#   the std\n")


def test_long_lists_are_cut():
    text = text_of({}, unknown=[f"key{index}=1" for index in range(20)])
    assert "#   and 8 more\n" in text
    assert "key12" not in text
