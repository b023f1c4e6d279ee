"""The plan of every recipe beside its stored numbers; those of the update on small cards where they bound `auto`."""

import pytest

from flowcorr.config import recipe_names
from tests.instruments.plan.goldens import STORED, bounded, numbers

TOLERANCES = {"weights": 1e-6, "peaks": 0.03, "engine": 0.03, "shared": 0.03, "flops": 0.01, "seconds": 0.03}
FAST = {"sd35_medium_ocr_lora", "tiny_ocr_lora"}


def test_every_recipe_has_stored_numbers():
    assert set(STORED) == set(recipe_names())


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in STORED]
)
def test_a_recipes_numbers_are_those_of_before(recipe):
    stored, found = STORED[recipe], numbers(recipe)
    for name, tolerance in TOLERANCES.items():
        assert found[name] == pytest.approx(stored[name], rel=tolerance), name
    cards = bounded(recipe)
    assert cards.keys() == stored["bounded"].keys()
    for card, expected in stored["bounded"].items():
        assert cards[card] == pytest.approx(expected, rel=0.03)
