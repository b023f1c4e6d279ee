"""Peaks by phase of every recipe, beside those that earlier versions traced block by block."""

import json
from pathlib import Path

import pytest

from flowcorr.config import load
from flowcorr.instruments.plan.devices import GPUS
from flowcorr.instruments.plan.estimate import make_plan, plan_of
from tests.instruments.plan.cards import RANKS, alone, traced

STORED = json.loads((Path(__file__).parent / "peaks.json").read_text(encoding="utf-8"))
"""GB on a card that holds the largest pass, and on each card that bounds `auto`, the micro-batch and its update."""
FAST = {"sd35_medium_ocr_lora", "tiny_ocr_lora"}


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in STORED]
)
def test_a_recipes_peaks_are_those_of_before(recipe):
    stored, config, ranks = STORED[recipe], load(recipe), RANKS.get(recipe, 1)
    memory = plan_of(traced(recipe), config, gpu=GPUS["h200-141gb"], ranks=ranks).memory
    peaks = {name: peak / 1e9 for name, peak in memory.phases.items()}
    assert peaks == pytest.approx(stored["peaks"], rel=0.03)
    assert memory.engine / 1e9 == pytest.approx(stored["engine"], rel=0.03)
    assert alone(memory) / 1e9 == pytest.approx(stored["shared"], rel=0.03)
    for card, bounded in stored["bounded"].items():
        plan = make_plan(config, gpu=GPUS[card], ranks=ranks)
        assert plan.micro_batch == bounded["micro_batch"]
        assert plan.memory.phases["update"] / 1e9 == pytest.approx(bounded["update"], rel=0.03)
