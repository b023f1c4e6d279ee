"""The table of recipes and cards shows what `flowcorr plan` predicts."""

import re

import pytest

from flowcorr.config import find_recipe
from tests.instruments.plan.cards import BEGIN, CARDS, END, PAGE, RECIPES, row

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
    assert row(recipe) in SHOWN, "write it anew: python -m tests.instruments.plan.cards"


def header(recipe):
    text = find_recipe(recipe).read_text(encoding="utf-8").partition("\nmodel:")[0]
    return " ".join(line.lstrip("# ") for line in text.splitlines())


@pytest.mark.parametrize("recipe", [name for name in RECIPES if "A step takes" in header(name)])
def test_a_recipes_header_says_the_pages_time(recipe):
    number, unit, card = re.search(
        r"takes about (\d+) (min|s)\w* on (?:an |two )?(H100|RTX \d+)", header(recipe)
    ).groups()
    place = [gpu.name.startswith(card.lower().replace(" ", "")) for gpu in CARDS].index(True)
    cells = next(line for line in SHOWN if f"`{recipe}`" in line).split("|")
    assert f"{number} {unit}" in cells[place - len(CARDS) - 1]
