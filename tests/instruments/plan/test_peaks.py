"""Peaks by phase of every recipe, beside those that earlier versions traced block by block."""

import json
from pathlib import Path

import pytest

from flowcorr.config import load
from flowcorr.instruments.plan.devices import GPUS
from flowcorr.instruments.plan.estimate import make_plan
from tests.instruments.plan.cards import RANKS, alone

STORED = json.loads((Path(__file__).parent / "peaks.json").read_text(encoding="utf-8"))
"""GB on a card that holds the largest pass, and on each card that bounds `auto`, the micro-batch and its update."""
FAST = {"sd35_medium_ocr_lora", "tiny_ocr_lora"}


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in STORED]
)
def test_a_recipes_peaks_are_those_of_before(recipe):
    stored = STORED[recipe]
    for card in ("h200-141gb", *stored["bounded"]):
        plan = make_plan(load(recipe), gpu=GPUS[card], ranks=RANKS.get(recipe, 1))
        peaks = {name: peak / 1e9 for name, peak in plan.memory.phases.items()}
        if card in stored["bounded"]:
            bounded = stored["bounded"][card]
            assert plan.micro_batch == bounded["micro_batch"]
            assert peaks["update"] == pytest.approx(bounded["update"], rel=0.03)
            continue
        assert peaks == pytest.approx(stored["peaks"], rel=0.03)
        assert plan.memory.engine / 1e9 == pytest.approx(stored["engine"], rel=0.03)
        assert alone(plan.memory) / 1e9 == pytest.approx(stored["shared"], rel=0.03)
