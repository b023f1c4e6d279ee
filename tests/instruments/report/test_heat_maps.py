from instruments.run_folders import write_run
from matplotlib.figure import Figure

from flowcorr.instruments.report.heat_maps import ROUNDING, heat_maps
from flowcorr.instruments.report.runs import group_by_seed, read_run


def colours_of(chart):
    figure = Figure()
    chart.draw(figure, **chart.data)
    picture = figure.axes[0].images[0]
    return picture.norm.vmin, picture.norm.vmax


def test_all_maps_have_the_scale_of_the_largest_drift(tmp_path):
    folders = [
        write_run(tmp_path / "a", scale=1.0),
        write_run(tmp_path / "b", "actor.lr=1e-4", scale=3.0),
    ]
    charts = heat_maps(group_by_seed([read_run(folder) for folder in folders]))
    assert {colours_of(chart) for chart in charts} == {(ROUNDING, 3.0 * 4e-4)}


def test_a_run_without_a_gap_says_so(tmp_path):
    (chart,) = heat_maps(group_by_seed([read_run(write_run(tmp_path / "a", scale=0.0))]))
    assert "0 everywhere" in chart.caption
