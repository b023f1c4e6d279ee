"""Hydra's files and overrides, read without Hydra."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.hydra import check_defaults, flat, overridden, read_override, read_overrides, resolved
from flowcorr.translate.unread import Unread


def test_a_file_is_its_values_by_dotted_keys():
    config = {
        "a": {"b": 1e-4, "c": True, "d": {}, "_target_": "x.y"},
        "e": {"f": {"g": 1}},
        "defaults": ["_self_"],
    }
    assert dict(flat(config, keep=("e.f",))) == {"a.b": 1e-4, "a.c": True, "a.d": {}, "e.f": {"g": 1}}
    assert dict(flat({"a": {"b": [1]}})) == {"a.b": [1]}


@pytest.mark.parametrize("defaults", [None, [], ["_self_"]])
def test_a_file_that_is_whole(defaults):
    check_defaults({"a": 1, "defaults": defaults})
    check_defaults({"a": 1})


def test_a_file_that_takes_values_from_others_is_refused():
    with pytest.raises(ConfigError, match="^it takes values from other files by its list defaults"):
        check_defaults({"defaults": [{"actor@actor": "dp"}], "a": 1})


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("a.b=1", "a.b", 1),
        ("+a=[1,x]", "a", [1, "x"]),
        ("++a=0.5_2", "a", "0.5_2"),
        ("a=", "a", None),
        ("a=b=c", "a", "b=c"),
        ("a=[", "a", "["),
        ("a/b=c", "a/b", "c"),
    ],
)
def test_an_override_is_a_key_and_a_value(word, key, value):
    assert read_override(word) == (key, value)


def test_an_override_that_is_none_is_refused():
    for word in ("a", "--multirun", "$X=1", "~a=1", "a b=1"):
        with pytest.raises(ConfigError, match="is not read, only key=value; leave it out$"):
            read_override(word)
    with pytest.raises(
        ConfigError, match=r"the argument '\$X' is not read, only key=value \(line 3: why\); leave it out$"
    ):
        read_override(Unread("$X", "line 3: why"))
    with pytest.raises(
        ConfigError, match="^the argument '--config-name=b' chooses other defaults, which are not read"
    ):
        read_override("--config-name=b")
    assert read_override(Unread("a=$X", "why")) == ("a", Unread("$X", "why"))


def test_an_override_of_a_section_is_one_of_each_of_its_keys():
    words = ["a.b={c: 1, d: {e: 2}}", "a.b.c=3", "f={g: 4}", Unread("h={i: $X}", "why")]
    assert read_overrides(words, keep=("f",)) == {
        "a.b.c": 3,
        "a.b.d.e": 2,
        "f": {"g": 4},
        "h": Unread("{i: $X}", "why"),
    }


def test_the_later_of_a_section_and_a_key_in_it_counts():
    whole, key = "a.b={c: 1}", "a.b.c=2"
    assert read_overrides([whole, key]) == {"a.b.c": 2}
    assert read_overrides([key, whole]) == {"a.b.c": 1}
    assert read_overrides(["a.b.d=3", whole]) == {"a.b.d": 3, "a.b.c": 1}  # Hydra merges
    assert read_overrides([key, "a.bc=3", "a.b=null"]) == {"a.bc": 3, "a.b": None}
    kept = read_overrides(["a.b.d=3", whole, "a.b.e=4"], keep=("a.b",))
    assert list(kept.items()) == [("a.b", {"c": 1}), ("a.b.e", 4)]
    assert overridden({"a.b.d": 3, "e": 1}, {"a.b": {"c": 1}}) == {"e": 1, "a.b": {"c": 1}}


def test_references_are_replaced():
    given = {
        "a.b": 2,
        "a.name": "x",
        "a.c": "${a.b}",
        "a.d": "${.c}",
        "e.f": "${a.name}/${a.b}",
        "e.g": ["${..a.b}", {"h": "${oc.select:a.b,3}"}],
        "e.i": "${oc.select:no.key,4}",
        "e.j": "\\${a.b}",
    }
    found = resolved(given)
    assert (found["a.c"], found["a.d"], found["e.f"], found["e.g"]) == (2, 2, "x/2", [2, {"h": 2}])
    assert (found["e.i"], found["e.j"]) == (4, "${a.b}")


@pytest.mark.parametrize(
    "text",
    [
        "${no.key}",
        "${oc.env:HOME}",
        "x${oc.env:HOME}y",
        "${a}",
        "${b}",
        "${oc.decode:1}",
        "${oc.select:no.key}",
        "${a",
    ],
)
def test_a_reference_that_the_file_does_not_tell_is_unread(text):
    found = resolved({"a": text, "b": "${a}"})["a"]
    if text == "${a":
        assert found == text  # no reference at all
    else:
        assert found == Unread(text, f"a={text} does not follow from the file; give its value as an override")


def test_a_value_that_is_missing_is_unread():
    assert resolved({"a": "???"})["a"].reason == "a=??? has no value; give it as an override"


def test_references_are_bounded():
    given = {"a0": "x" * 10} | {f"a{n}": f"${{a{n - 1}}}${{a{n - 1}}}" for n in range(1, 41)}
    assert isinstance(resolved(given)["a40"], Unread)
