"""Charts as text of a page and as files."""

import io
import re

import pytest
from PIL import Image

from flowcorr.instruments.drawing import WIDTH, Chart, number
from flowcorr.instruments.plots import Curve, draw_curves

POINTS = [(step, step / 4, step / 8, step / 2) for step in range(5)]


def chart_of(*marks, name="chart", **more):
    curves = [Curve(mark=mark, colour="#000000", band=POINTS) for mark in marks]
    return Chart(name=name, title="A chart", draw=draw_curves, data={"curves": curves}, **more)


def test_svg_is_small_plain_and_escaped(evil):
    svg = str(chart_of(evil).svg())
    assert svg.startswith('<svg viewBox="0 0 380 220">')
    assert "<script" not in svg
    assert "&lt;script&gt;" in svg
    assert "$x$" in svg
    assert not re.search('http|<style|<metadata|pt"', svg)
    assert len(svg) < 20_000


def test_a_letter_that_the_font_lacks_warns_of_nothing():
    """Warnings are errors here."""
    chart = chart_of("\u5b9e\u9a8c")
    assert "\u5b9e\u9a8c" in chart.svg()
    assert chart.png()


def test_the_same_chart_is_the_same_text():
    assert chart_of("a").svg() == chart_of("a").svg()


def test_two_charts_share_no_name_of_a_part():
    parts = [set(re.findall(r' id="([^"]*)"', chart_of("a", name=name).svg())) for name in ("one", "two")]
    assert all(parts)
    assert parts[0].isdisjoint(parts[1])


def test_png_is_larger_by_its_words():
    sizes = []
    for caption, note in (("", ""), ("unit", ""), ("unit", "A: a; B: b")):
        with Image.open(io.BytesIO(chart_of("a", caption=caption).png(note))) as picture:
            sizes.append(picture.size)
    assert {width for width, _ in sizes} == {2 * WIDTH}
    assert sizes[0][1] < sizes[1][1] < sizes[2][1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.25, "0.25"),
        (-1200.0, "-1200"),
        (2e-5, "2e-5"),
        (3.4567e7, "3.46e7"),
        (0.0005, "0.0005"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text
