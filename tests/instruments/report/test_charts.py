"""What the charts of a report show."""

import json
import re
from dataclasses import replace

import pytest
import torch
from instruments.html_pages import drawn
from instruments.run_folders import dump, write_run
from matplotlib.colors import to_hex

import flowcorr
from flowcorr.instruments.drawing import BLUE, INK
from flowcorr.instruments.plots import SERIOUS, UNHEALTHY
from flowcorr.instruments.report.charts import MAX_CHARTS, chart_sections, marks
from flowcorr.instruments.report.runs import group_by_seed, read_run
from flowcorr.instruments.thinning import MAX_ROWS

CORRECTION = "algorithm.rollout_correction"
OUTSIDE = "outside this plot"


def numbers_of(text):
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def charts_of(*folders):
    sections = chart_sections(group_by_seed([read_run(folder) for folder in folders]))
    return {chart.name: chart for section in sections for chart in section.pictures.values()}


@pytest.mark.parametrize("value", [0.0, 1e-4])
def test_limits_of_shares_are_drawn_however_far_they_are(value, tmp_path):
    folder = write_run(tmp_path / "a", scale=0.0)
    metrics = {"rollout_corr/rollout_is_eff_sample_size": 1 - value, "rollout_corr/rejected_ratio": value}
    records = [{"step": step, **{name: part * step for name, part in metrics.items()}} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    charts = charts_of(folder)
    for name in ("rollout_corr_rollout_is_eff_sample_size", "rollout_corr_rejected_ratio"):
        assert charts[name].shaded
        assert OUTSIDE not in charts[name].caption
    assert numbers_of(charts["rollout_corr_rejected_ratio"].caption) == [0.05, 0.1]  # healthy, serious


def test_a_limit_is_far_where_it_is_not_drawn_and_only_there(runs):
    for chart in charts_of(*runs).values():
        if "healthy" in chart.caption:
            assert (OUTSIDE in chart.caption) != chart.shaded


def test_serious_shares_are_shaded_darker(tmp_path):
    axes = drawn(charts_of(write_run(tmp_path / "a"))["rollout_corr_rejected_ratio"])  # .2
    shades = [patch for patch in axes.patches if patch.get_zorder() < 1]
    assert [to_hex(patch.get_facecolor()) for patch in shades] == [UNHEALTHY, SERIOUS]
    assert [patch.get_y() for patch in shades] == pytest.approx([0.05, 0.1])


def test_weights_of_the_update_are_drawn(tmp_path):
    folder = write_run(tmp_path / "a", f"{CORRECTION}.preset=bypass_pg_is")
    name = "actor/rollout_corr/rollout_is_eff_sample_size"
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, name: 0.2}), encoding="utf-8")
    assert 0.3 in numbers_of(charts_of(folder)[name.replace("/", "_")].caption)


def test_long_runs_are_drawn_by_means_with_their_extremes(tmp_path):
    charts = charts_of(write_run(tmp_path / "a", steps=1001))
    chart = charts["rollout_corr_kl"]
    axes = drawn(chart)
    line = axes.lines[-2]
    assert len(line.get_xdata()) == 167  # of six steps each, the last of five
    assert (line.get_xdata()[-1], line.get_ydata()[-1]) == pytest.approx((1001, 0.999))
    (band,) = axes.collections
    lows_and_highs = band.get_paths()[0].vertices[:, 1]
    assert (min(lows_and_highs), max(lows_and_highs)) == pytest.approx((1e-3, 1.001))
    assert "over 6 steps" in chart.caption
    picture = drawn(charts["drift_by_timestep_0"]).images[0].get_array()
    assert picture.shape == (2, 167)
    assert picture[0, 0] == pytest.approx(3.5e-4)  # the mean of 1e-4 to 6e-4
    assert "means over" not in "".join(
        chart.caption for chart in charts_of(write_run(tmp_path / "b")).values()
    )


def test_steps_without_a_value_are_gaps(tmp_path):
    folder = write_run(tmp_path / "a")
    records = [{"step": step, f"rollout_corr/step_{step}/logprob_abs_diff": 1e-4 * step} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    picture = drawn(charts_of(folder)["drift_by_timestep_0"]).images[0].get_array()
    assert picture.mask.tolist() == [[False, True], [True, False]]


def test_the_legend_names_groups(runs, tmp_path):
    groups = group_by_seed([read_run(folder) for folder in runs])
    assert marks(groups[:1]) == [""]
    assert marks(groups) == ["a, b", "c <script>"]
    long = [replace(group, label=f"{group.label} with a long name") for group in groups]
    assert marks(long) == ["A", "B"]
    (legend,) = drawn(charts_of(*runs)["reward_mean"]).figure.legends
    assert {label.get_text().strip() for label in legend.get_texts()} == {"a, b", "c <script>"}


def test_bins_outside_the_clip_range_stand_out(tmp_path):
    folder = write_run(tmp_path / "a", "actor.clip_ratio=1e-3")
    dump(folder)
    inside, outside = drawn(charts_of(folder)["ratios_0"]).patches
    assert (to_hex(inside.get_facecolor()), to_hex(outside.get_facecolor())) == (BLUE, INK)
    parts = [patch.get_data() for patch in (inside, outside)]
    assert sum(part.values.sum() for part in parts) == pytest.approx(1, abs=0.01)
    for part, is_inside in zip(parts, (True, False), strict=True):
        middles = (part.edges[1:] + part.edges[:-1]) / 2
        assert part.values.any()
        assert ((abs(middles[part.values > 0]) <= 1.01e-3) == is_inside).all()


def test_time_is_a_bar_a_phase(tmp_path):
    chart = charts_of(write_run(tmp_path / "a"))["time_0"]
    axes = drawn(chart)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rollout", "update", "other"]
    assert [text.get_text() for text in axes.texts] == ["2 s, 50%", "1 s, 25%", "1 s, 25%"]
    assert "4 s" in chart.caption


def test_seconds_have_no_exponent(tmp_path):
    folder = write_run(tmp_path / "a")
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    longer = [
        {name: 500 * value if name.startswith("timing/") else value for name, value in record.items()}
        for record in records
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in longer))
    chart = charts_of(folder)["time_0"]
    assert [text.get_text() for text in drawn(chart).texts] == ["1000 s, 50%", "500 s, 25%", "500 s, 25%"]
    assert "2000 s" in chart.caption


def test_whole_numbers_of_any_size_are_drawn(tmp_path):
    folder = write_run(tmp_path / "a", steps=0)
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "timing/step": 10**30, "timing/update": 10**30})
    )
    assert [label.get_text() for label in drawn(charts_of(folder)["time_0"]).get_yticklabels()] == ["update"]


def test_metrics_whose_files_would_share_a_name_are_all_drawn(tmp_path):
    folder = write_run(tmp_path / "a", steps=0)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/a/b": 0.1, "reward/a_b": 0.2}))
    found = charts_of(folder)
    assert [found[name].metric for name in ("reward_a_b", "reward_a_b_")] == ["reward/a/b", "reward/a_b"]
    assert found["reward_a_b"].name != found["reward_a_b_"].name


def test_of_many_metrics_and_steps_some_are_drawn(tmp_path):
    """A stranger's file may name thousands, each with a chart or a row that takes its time."""
    folder = write_run(tmp_path / "a")
    names = [f"reward/{place}" for place in range(MAX_CHARTS + 5)]
    names += [f"rollout_corr/step_{place}/logprob_abs_diff" for place in range(900)]
    names.append(f"rollout_corr/step_{'9' * 150}/logprob_abs_diff")
    record = {"step": 1, **dict.fromkeys(names, 0.5)}
    (folder / "metrics.jsonl").write_text(json.dumps(record), encoding="utf-8")
    groups = group_by_seed([read_run(folder)])
    learning, drift = (
        section for section in chart_sections(groups) if section.title in ("Learning", "Drift by timestep")
    )
    assert len(learning.pictures) == MAX_CHARTS
    assert numbers_of(learning.text) == [len(names) - 901, MAX_CHARTS]
    assert f"{MAX_ROWS} of 900" in next(iter(drift.pictures.values())).caption


def test_of_a_long_window_some_steps_are_drawn(tmp_path):
    window = torch.zeros(2, 200)
    flowcorr.dump(tmp_path, 1, rollout_log_probs=window, old_log_probs=window + 1e-3, advantages=[1.0, -1.0])
    caption = charts_of(tmp_path)["mismatch_by_step_0"].caption
    assert f"{MAX_ROWS} of 200" in caption
    assert "step 0: " in caption
    assert "199: " in caption
