"""The pages' tables are those of the code, and everything that a run logs is in them."""

from dataclasses import fields

import pytest

from flowcorr.cli import main
from flowcorr.config import Config, to_mapping
from flowcorr.correction.presets import NAMES
from flowcorr.diagnostics.health import RULES
from flowcorr.diagnostics.reference.keys import find_key, keys
from flowcorr.diagnostics.reference.metrics import find_metric
from flowcorr.diagnostics.reference.pages import PAGES, rewritten


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_pages_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert rewritten(text) == text, "run: python -m flowcorr.diagnostics.reference.pages"


def test_a_stale_table_is_rewritten():
    assert "decoupled_seq_is" in rewritten("# Page\n<!-- table: presets -->\nold\n<!-- end -->\n")


def _dotted(mapping, prefix=""):
    for name, value in mapping.items():
        nested = isinstance(value, dict) and value and f"{prefix}{name}" != "rollout.engine"
        yield from _dotted(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]


def test_every_key_is_explained():
    known = {key.name: key for key in keys()}
    assert all(key.meaning for key in known.values())
    sections = {"algorithm.rollout_correction"}  # null by default
    assert set(_dotted(to_mapping(Config()))) - sections <= set(known)
    assert all(field.name in {name.split(".")[0] for name in known} for field in fields(Config))
    assert find_key("clip_ratio").default == "0.001"
    assert find_key("dtype") is None  # of several sections


def test_every_health_rule_has_its_metric():
    for rule in RULES:
        name = rule.metric if "/" in rule.metric else f"rollout_corr/{rule.metric}"
        assert find_metric(name).name == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rollout_corr/k3_kl", "never negative"),
        ("rollout_corr/rejected_ratio", "outside: find the cause with `flowcorr doctor` first"),
        ("actor/rollout_corr/rollout_is_mean", "over the whole update"),
        ("rollout_corr/step_12/kl", "of step index"),
        ("reward/exact_match", "reward term"),
        ("actor.clip_ratio", "values: number | list of number; default: 0.001"),
        ("geo_rs", "rollout_token_veto_threshold: 0.0001"),
    ],
)
def test_a_name_is_explained(name, text, capsys):
    assert main(["explain", name]) == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_preset_is_explained(name, capsys):
    assert main(["explain", name]) == 0
    assert f"{name} (preset, " in capsys.readouterr().out


def test_an_unknown_name_shows_near_ones(capsys):
    assert main(["explain", "rolout_corr/k3_kl"]) == 2
    assert "did you mean rollout_corr/k3_kl" in capsys.readouterr().err
