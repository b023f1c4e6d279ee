"""`flowcorr explain --all`."""

import re

import pytest

from flowcorr.cli import main
from flowcorr.correction import PRESETS
from flowcorr.correction.modes import RS_MODES
from flowcorr.health.table import METRICS, RULES
from flowcorr.instruments.doctor.checks import CAUSES, CHECKS
from flowcorr.instruments.fault_words import FAULTS
from flowcorr.instruments.reference.explain import explanation
from flowcorr.instruments.reference.glossary import WORDS
from flowcorr.instruments.reference.interfaces import INTERFACES
from flowcorr.instruments.reference.keys import keys
from flowcorr.instruments.reference.tables import OF_SEVERAL_STEPS, everything


def _rows(text):
    """The cells of each row of each table, and of each header."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [
        [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
    ]


def test_every_name_is_in_the_tables(capsys):
    assert main(["explain", "--all"]) == 0
    text = capsys.readouterr().out
    rows = _rows(text)
    named = {name for row in rows for cell in row for name in re.findall(r"`([^`]+)`", cell)}
    tables = (PRESETS, RS_MODES, CAUSES, FAULTS, WORDS, OF_SEVERAL_STEPS)
    names = {name for table in tables for name in table}
    names |= {row.name for table in (keys(), METRICS, RULES, CHECKS) for row in table}
    assert names <= named
    assert all(f"## `{name}`" in text for name in INTERFACES)


def test_rows_say_as_much_as_an_explanation():
    cells = {row[0]: row[1:] for row in _rows(everything())}
    for metric in METRICS:
        advice = [] if metric.rule is None else [f"`{metric.rule.name}`", metric.rule.advice]
        assert {metric.meaning, metric.unit, *advice} <= set(cells[f"`{metric.name}`"])
    for key in keys():
        assert [cell.strip("`") for cell in cells[f"`{key.name}`"][1:]] == [key.choices, key.default]
        assert cells[f"`{key.name}`"][0] == key.meaning
    assert "≥ 0.3" in cells["`rollout_corr/rollout_is_eff_sample_size`"]
    assert cells["clipped"] == ["`actor/pg_clipfrac`"]


def test_tables_have_rows_of_one_length():
    tables = [part for part in everything().split("\n\n") if part.startswith("| ")]
    assert all(len({len(row) for row in _rows(table)}) == 1 for table in tables)


@pytest.mark.parametrize("name", INTERFACES)
def test_an_interface_is_explained_by_its_last_part(name):
    last = name.rpartition(".")[2]
    assert explanation(name).startswith(f"{name} (")
    assert explanation(name) in explanation(last)  # which may be a word, too


@pytest.mark.parametrize("arguments", [[], ["--all", "kl"]])
def test_explain_takes_names_or_all(arguments, capsys):
    assert main(["explain", *arguments]) == 2
    assert "--all" in capsys.readouterr().err
