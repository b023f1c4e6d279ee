"""A finding is a line of a log, and its keys load."""

import shlex
from dataclasses import replace

import pytest

from flowcorr.config import load
from flowcorr.health.finding import Finding, as_overrides, shown, worst


def test_the_worst_level_of_none_is_healthy():
    assert worst(["note", "warning", "healthy"]) == "warning"
    assert worst([]) == "healthy"


def test_a_finding_is_a_line_of_a_log():
    finding = Finding(
        level="note", cause="kl", sentence="it grew", numbers={"step": 7, "kl": 0.12345}, remedy="look"
    )
    assert str(finding) == "note: it grew (step 7, kl 0.123); look"
    assert str(Finding(level="note", cause="kl", sentence="it grew")) == "note: it grew"
    assert [shown(None), shown([1, 0.5]), shown(True)] == ["-", "1 0.5", "True"]
    assert str(replace(finding, reason="it was 0")) == "note: it grew; it was 0 (step 7, kl 0.123); look"


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
