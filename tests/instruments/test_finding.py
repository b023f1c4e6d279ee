"""A report holds plain values, and its keys load."""

import json
import shlex
from dataclasses import replace

import pytest

from flowcorr.config import load
from flowcorr.instruments.finding import Column, Fact, Finding, Report, Table, as_overrides, shown, worst


def test_the_worst_level_is_that_of_the_report():
    findings = [Finding(level=level, cause="x", sentence="y") for level in ("healthy", "warning", "note")]
    assert Report(title="", verdict="", findings=findings).level == "warning"
    assert Report(title="", verdict="").level == worst([]) == "healthy"


def test_a_finding_is_a_line_of_a_log():
    finding = Finding(
        level="note", cause="kl", sentence="it grew", numbers={"step": 7, "kl": 0.12345}, remedy="look"
    )
    assert str(finding) == "note: it grew (step 7, kl 0.123); look"
    assert str(Finding(level="note", cause="kl", sentence="it grew")) == "note: it grew"
    assert str(replace(finding, reason="it was 0")) == "note: it grew; it was 0 (step 7, kl 0.123); look"


def test_data_are_finite_and_under_their_names():
    columns = [Column(name="step", words=True), Column(name="gap", heading="|delta|", show="{:.1e}".format)]
    table = Table(name="steps", title="By step", columns=columns, rows=[(0, 0.1), (1, float("nan"))])
    report = Report(title="a", verdict="b", facts=[Fact(name="nats", value=1.5)], tables=[table])
    data = json.loads(json.dumps(report.to_mapping(), allow_nan=False))
    assert data["facts"] == {"nats": 1.5}
    assert data["tables"] == {"steps": [{"step": 0, "gap": 0.1}, {"step": 1, "gap": None}]}
    assert (report.fact("nats"), report.fact("none"), report.table("none")) == (1.5, None, [])
    assert (table.header, table.num_words, table.cells((None, 0.1))) == (
        ["step", "|delta|"],
        1,
        ["-", "1.0e-01"],
    )
    assert shown(None) == "-"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "actor:\n  clip_ratio: [1.0e-3, 2.0e-3, 1.0e-3, 1.0e-3]\n",
            {"actor.clip_ratio": (1e-3, 2e-3, 1e-3, 1e-3)},
        ),
        ("algorithm:\n  rollout_correction:\n    bypass_mode: true\n", {"mode": "bypass"}),
        ("trainer:\n  seed: 3\nalgorithm:\n  advantage_std: global\n", {"seed": 3, "std": "global"}),
    ],
)
def test_keys_load_on_top_of_a_recipe(keys, expected):
    config = load("tiny_ocr_lora", shlex.split(as_overrides(keys)))
    found = {
        "actor.clip_ratio": config.actor.clip_ratio,
        "mode": config.algorithm.rollout_correction.mode,
        "seed": config.trainer.seed,
        "std": config.algorithm.advantage_std,
    }
    assert {name: found[name] for name in expected} == expected
