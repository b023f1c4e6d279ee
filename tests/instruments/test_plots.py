"""What is in view in the charts."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from flowcorr.instruments.plots import (
    Curve,
    draw_curves,
    draw_heat_map,
    heights,
    limit_in_view,
)

ALL = (-math.inf, math.inf)


def curve(*values):
    return Curve.line("", "k", enumerate(values))


def test_limits_far_away_are_left_out_where_the_values_matter():
    lines = [curve(1.0, 1.1)]
    assert limit_in_view(lines, (-math.inf, 1.2))
    assert not limit_in_view(lines, (-math.inf, 20.0))
    assert limit_in_view(lines, (-math.inf, 20.0), zoom=False)
    assert limit_in_view(lines, (1.05, math.inf))  # broken
    assert not limit_in_view(lines, ALL)


@pytest.mark.parametrize("value", [0.0, 5.0, -5.0, 1e-12])
def test_equal_values_have_room(value):
    low, high = heights([curve(value, value)], ALL, zoom=True)
    assert low <= value <= high
    assert high - low > 0.05 * abs(value)


@pytest.mark.parametrize(("steps", "ticks"), [([1], [1]), ([3, 4], [3, 4]), ([0, 1, 2], [0, 1, 2])])
def test_training_steps_are_whole_numbers(steps, ticks):
    figure = Figure()
    draw_curves(figure, [Curve.line("", "k", [(step, 0.5) for step in steps])])
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == ticks


def test_no_two_numbers_at_an_axis_read_alike():
    lines, squares = Figure(), Figure()
    values = [(100_000 + 100 * place, 1 + 1e-6 * place) for place in range(5)]
    draw_curves(lines, [Curve.line("", "k", values)])
    draw_heat_map(
        squares, ["a"], [step for step, _ in values], {("a", step): 1.0 for step, _ in values}, (0.1, 1.0)
    )
    for axis in (lines.axes[0].xaxis, lines.axes[0].yaxis, squares.axes[0].xaxis):
        texts = [label.get_text() for label in axis.get_ticklabels()]
        assert len(set(texts)) == len(texts) > 3
    assert "1.000002" in [label.get_text() for label in lines.axes[0].get_yticklabels()]


@pytest.mark.parametrize("cells", [{("a", 1): 0.0}, {("a", 1): 2.0}, {("a", 1): 0.0, ("b", 2): 1e-6}])
@pytest.mark.parametrize("scale", [(5e-7, 0.0), (5e-7, 2.0)])
def test_heat_maps_of_few_values(cells, scale):
    figure = Figure()
    draw_heat_map(figure, ["a", "b"], [1, 2], cells, scale)
    picture = figure.axes[0].images[0]
    shown = picture.get_array()
    assert shown.count() == len(cells)
    colours = picture.cmap(picture.norm(shown.compressed()))
    grey = [bool(np.ptp(colour[:3]) == 0) for colour in colours]
    assert grey == [value < scale[0] for value in cells.values()]


def test_the_legend_names_every_line_in_the_order_of_their_ends():
    figure = Figure()
    marks = {"low": 1.0, "_high": 3.0, "middle": 2.0}
    draw_curves(figure, [Curve.line(mark, "k", [(0, 1.5), (1, end)]) for mark, end in marks.items()])
    (legend,) = figure.legends
    assert [text.get_text().strip() for text in legend.get_texts()] == ["_high", "middle", "low"]
