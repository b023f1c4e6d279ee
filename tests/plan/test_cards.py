"""The table of recipes and cards shows what `flowcorr plan` predicts."""

import pytest

from tests.plan.cards import BEGIN, END, PAGE, RECIPES, row

# The fake device has to be registered before a process computes its first gradient.
pytestmark = pytest.mark.fake_device
SHOWN = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines(keepends=True)[2:]


def test_the_page_has_a_row_for_each_recipe():
    assert [line.split("`")[1] for line in SHOWN] == list(RECIPES)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[] if name == "sd35_medium_ocr_lora" else pytest.mark.slow)
        for name in RECIPES
    ],
)
def test_the_page_shows_the_plan_of_today(recipe):
    assert row(recipe) in SHOWN, "write it anew: python -m tests.plan.cards"
