import json

from instruments.run_folders import write_run
from matplotlib.figure import Figure

from flowcorr.instruments.report.bands import MAX_BANDS, band_charts
from flowcorr.instruments.report.runs import group_by_seed, read_run
from flowcorr.instruments.thinning import MAX_POINTS


def add(folder, **metrics):
    """Add metrics to each training step of a run; a function gives the value at a step."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records[1:-1]:
        record |= {name.replace("__", "/"): value(record["step"]) for name, value in metrics.items()}
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def charts_of(folder):
    return band_charts(group_by_seed([read_run(folder)]))


def test_a_chart_a_mode_has_the_ends_of_each_steps_band(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    prefix = "rollout_corr__step_{}__rollout_rs_{}_threshold_{}".format
    add(
        folder,
        **{
            prefix(0, "token_k1", "low"): lambda step: 1 - 0.01 * step,
            prefix(0, "token_k1", "high"): lambda step: 1 + 0.01 * step,
            prefix(2, "token_k1", "high"): lambda step: 1.5,
            prefix(1, "seq_max_k2", "high"): lambda step: 0.1,
        },
    )
    squares, ratios = charts_of(folder)
    assert "seq_max_k2" in squares.title
    (curve,) = squares.data["curves"]
    assert curve.mark == "step 1"
    first, second = ratios.data["curves"]
    assert [curve.mark for curve in (first, second)] == ["step 0", "step 2"]
    assert first.band == [(step, 1.0, 1 - 0.01 * step, 1 + 0.01 * step) for step in (1, 2, 3)]
    assert second.band == [(step, 1.5, 1.5, 1.5) for step in (1, 2, 3)]
    ratios.draw(Figure(), **ratios.data)


def test_no_band_no_chart(tmp_path):
    folder = write_run(tmp_path / "run")
    assert charts_of(folder) == []
    add(folder, rollout_corr__step_0__rollout_rs_token_k1_threshold_high=lambda step: None)
    assert charts_of(folder) == []


def test_of_many_steps_some_are_drawn_and_their_number_is_told(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    name = "rollout_corr__step_{}__rollout_rs_seq_max_k2_threshold_high".format
    add(folder, **{name(index): lambda step: 0.1 for index in range(12)})
    (chart,) = charts_of(folder)
    drawn = [curve.mark for curve in chart.data["curves"]]
    assert (len(drawn), drawn[0], drawn[-1]) == (MAX_BANDS, "step 0", "step 11")
    assert f"{MAX_BANDS} of 12 steps" in chart.caption


def test_the_band_of_a_long_run_ends_at_its_last_step(tmp_path):
    folder = write_run(tmp_path / "run", steps=2 * MAX_POINTS)
    add(folder, rollout_corr__step_0__rollout_rs_token_k1_threshold_high=lambda step: 1 + step / 1000)
    (curve,) = charts_of(folder)[0].data["curves"]
    assert (curve.band[0][0], curve.band[-1][:2], len(curve.band)) == (1, (2 * MAX_POINTS, 1.4), MAX_POINTS)
