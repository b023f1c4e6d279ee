"""Configurations that another trainer has resolved."""

import re

import pytest
import yaml

from flowcorr.errors import ConfigError
from flowcorr.translate.resolved import read_overrides, read_sections, resolved
from tests.translate.configs import omni_yaml

BEFORE = "+ set -x\nLogging to outputs/a.log\nsite.py:12: UserWarning: old\n  warnings.warn(\n\n"
AFTER = "wandb: Find logs at: ./wandb\n+ check_leak_monitor\nFlowGRPO e2e test passed\n"


def test_a_configuration_is_found_in_what_a_script_prints():
    text = omni_yaml()
    assert read_sections(BEFORE + text + AFTER) == read_sections(text) == yaml.safe_load(text)
    assert read_sections(text.replace("\n", "\r\n")) == read_sections(text)


def test_output_between_the_lines_of_a_configuration_is_refused():
    before, root, after = omni_yaml().partition("\nalgorithm:")
    line = before.count("\n") + 2
    with pytest.raises(ConfigError, match=f"^line {line}, 'Ray: started', .* line {line + 1};"):
        read_sections(f"{before}\nRay: started{root}{after}")


def test_two_configurations_in_one_file_are_refused():
    text = omni_yaml()
    first = text[: text.index("\nactor_rollout_ref:")].count("\n") + 2
    with pytest.raises(ConfigError, match=f"^lines {first}, {first + text.count(chr(10))} "):
        read_sections(text + text)


@pytest.mark.parametrize(
    "text", ["#!/bin/bash\n", "set -x\nA=1", "python3 -m verl_omni.trainer.main_diffusion a=1"]
)
def test_a_script_has_no_sections(text):
    assert read_sections(text) is None


@pytest.mark.parametrize("text", ["", "- 1", "3", "text"])
def test_what_holds_no_sections_is_no_configuration(text):
    with pytest.raises(ConfigError, match="sections"):
        read_sections(text)


def test_the_file_of_wandb():
    text = "wandb_version: 1\n_wandb: {value: {m: 1}}\ntrain: {desc: null, value: {lr: 1.0e-4}}\nseed: {value: 1}"
    assert read_sections(text) == {"train": {"lr": 1e-4}, "seed": 1}


def test_a_file_that_takes_values_from_others_is_refused():
    assert read_sections("defaults: [_self_]\na: 1") == {"a": 1}
    with pytest.raises(ConfigError, match=r"list defaults; .* under \.hydra.*--resolve"):
        read_sections("defaults: [{actor@actor: dp}]\na: 1")


def test_an_override_is_a_key_and_a_value():
    words = ["a.b=1", "+a=[1,x]", "++c=0.5_2", "d=", "e=b=c", "f=[", "a={g: 1}", "h/i=j"]
    assert list(read_overrides(words).items()) == [
        *(("a.b", 1), ("c", "0.5_2"), ("d", None), ("e", "b=c"), ("f", "[")),
        *(("a", {"g": 1}), ("h/i", "j")),
    ]


@pytest.mark.parametrize(
    ("word", "cause"),
    [(word, "key=value;") for word in ("a", "--multirun", "$X=1", "~a=1", "a b=1")]
    + [("--config-name=b", "other defaults")],
)
def test_an_argument_that_is_no_override_is_refused(word, cause):
    with pytest.raises(ConfigError, match=f"^the argument {re.escape(repr(word))} .*{cause}"):
        read_overrides([word])


def test_overrides_count_in_their_order_and_sections_are_merged():
    whole, key, given = "a.b={c: 1}", "a.b.c=2", {"a": {"b": {"d": 3}}}
    assert resolved(given, read_overrides([whole, key])) == {"a": {"b": {"d": 3, "c": 2}}}
    assert resolved(given, read_overrides([key, whole])) == {"a": {"b": {"d": 3, "c": 1}}}
    assert resolved(given, read_overrides(["a.b=null"])) == {"a": {"b": None}}
    assert resolved(given, read_overrides(["a.b={}"])) == {"a": {"b": {}}}


@pytest.mark.parametrize(
    ("key", "value", "named"), [("y", 1, "x.y=1"), ("api_key", "hidden", "x.api_key=***")]
)
def test_a_key_of_a_list_cannot_be_set_and_secrets_are_not_told(key, value, named):
    with pytest.raises(ConfigError, match=f"^{re.escape(named)} (?!.*hidden)"):
        resolved({"x": [1]}, {f"x.{key}": value})


def test_references_are_replaced():
    given = {
        "a": {
            "b": 2,
            "name": "x",
            "c": "${a.b}",
            "d": "${.c}",
            "list": ["${a.b}", {"h": "${oc.select:a.b,3}"}],
        },
        "e": {
            "f": "${a.name}/${a.b}",
            "i": "${oc.select:no.key,4}",
            "k": "${oc.select:no.key, null}",
            "l": "${a}",
        },
    }
    found = resolved(given, {"a.b": 5})
    assert found["a"] == {"b": 5, "name": "x", "c": 5, "d": 5, "list": [5, {"h": 5}]}
    assert found["e"] == {"f": "x/5", "i": 4, "k": None, "l": found["a"]}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "${no.key}",
            "${oc.env:HOME}",
            "x${oc.env:HOME}y",
            "${a}",
            "${b}",
            "${oc.decode:1}",
            "\\${c}",
            "???",
        ),
        *(
            "${${d}:HOME}",
            "${oc.${e}:HOME}",
            "\\\\${oc.env:HOME}",
            "${oc.select:c,${oc.env:HOME}}",
            "${oc.create:{}}",
        ),
    ],
)
def test_what_the_file_does_not_tell_stays_as_it_is(text, monkeypatch):
    """Above all, the environment is not read."""
    monkeypatch.setenv("HOME", "read from the environment")
    found = resolved({"a": text, "b": "${a}", "c": 1, "d": "oc.env", "e": "env"}, {})
    assert "environment" not in str(found)
    assert "$" in str(found["a"]) or found["a"] == "???"


def test_references_are_bounded():
    texts = {"a0": "x" * 10} | {f"a{n}": f"${{a{n - 1}}}${{a{n - 1}}}" for n in range(1, 41)}
    with pytest.raises(ConfigError, match="^80 references .* 24;"):
        resolved(texts, {})
    sections = {"a0": {"x": 1}} | {
        f"a{n}": {"x": f"${{a{n - 1}}}", "y": f"${{a{n - 1}}}"} for n in range(1, 41)
    }
    for values in (sections, {"a": {"b": "${c}"}, "c": {"d": "${a}"}}):
        with pytest.raises(ConfigError, match="20000 values, .*50 levels$"):
            resolved(values, {})
