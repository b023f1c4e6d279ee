"""Configurations that another trainer has resolved."""

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
    with pytest.raises(
        ConfigError, match="'Ray: started', stands inside the configuration, which goes on in line"
    ):
        read_sections(f"{before}\nRay: started{root}{after}")
    with pytest.raises(ConfigError, match="all begin a configuration; leave the one to translate$"):
        read_sections(omni_yaml() + omni_yaml())


@pytest.mark.parametrize(
    "text", ["#!/bin/bash\n", "set -x\nA=1", "python3 -m verl_omni.trainer.main_diffusion a=1"]
)
def test_a_script_has_no_sections(text):
    assert read_sections(text) is None


@pytest.mark.parametrize("text", ["", "- 1", "3", "text"])
def test_what_holds_no_sections_is_no_configuration(text):
    with pytest.raises(ConfigError, match="^it is no configuration of a trainer"):
        read_sections(text)


def test_the_file_of_wandb():
    text = "wandb_version: 1\n_wandb: {value: {m: 1}}\ntrain: {desc: null, value: {lr: 1.0e-4}}\nseed: {value: 1}"
    assert read_sections(text) == {"train": {"lr": 1e-4}, "seed": 1}


def test_a_file_that_takes_values_from_others_is_refused():
    assert read_sections("defaults: [_self_]\na: 1") == {"a": 1}
    with pytest.raises(
        ConfigError, match="^it takes values from other files by its list defaults; .*--resolve"
    ):
        read_sections("defaults: [{actor@actor: dp}]\na: 1")


def test_an_override_is_a_key_and_a_value():
    words = ["a.b=1", "+a=[1,x]", "++c=0.5_2", "d=", "e=b=c", "f=[", "a={g: 1}", "h/i=j"]
    assert list(read_overrides(words).items()) == [
        *(("a.b", 1), ("c", "0.5_2"), ("d", None), ("e", "b=c"), ("f", "[")),
        *(("a", {"g": 1}), ("h/i", "j")),
    ]
    for word in ("a", "--multirun", "$X=1", "~a=1", "a b=1"):
        with pytest.raises(
            ConfigError, match="is not read, only key=value; leave it out, or let Hydra print"
        ):
            read_overrides([word])
    with pytest.raises(ConfigError, match="^the argument '--config-name=b' chooses other defaults"):
        read_overrides(["--config-name=b"])


def test_overrides_count_in_their_order_and_sections_are_merged():
    whole, key, given = "a.b={c: 1}", "a.b.c=2", {"a": {"b": {"d": 3}}}
    assert resolved(given, read_overrides([whole, key])) == {"a": {"b": {"d": 3, "c": 2}}}
    assert resolved(given, read_overrides([key, whole])) == {"a": {"b": {"d": 3, "c": 1}}}
    assert resolved(given, read_overrides(["a.b=null"])) == {"a": {"b": None}}
    assert resolved(given, read_overrides(["a.b={}"])) == {"a": {"b": {}}}
    with pytest.raises(ConfigError, match="^x.y=1 cannot be set: "):
        resolved({"x": [1]}, {"x.y": 1})
    with pytest.raises(ConfigError, match=r"^x.api_key=\*\*\* cannot be set: (?!.*hidden)"):
        resolved({"x": [1]}, {"x.api_key": "hidden"})


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
    with pytest.raises(ConfigError, match="^80 references inside text are more than 24"):
        resolved(texts, {})
    sections = {"a0": {"x": 1}} | {
        f"a{n}": {"x": f"${{a{n - 1}}}", "y": f"${{a{n - 1}}}"} for n in range(1, 41)
    }
    for values in (sections, {"a": {"b": "${c}"}, "c": {"d": "${a}"}}):
        with pytest.raises(
            ConfigError, match="^with its references it holds more than 20000 values, or 50 levels$"
        ):
            resolved(values, {})
