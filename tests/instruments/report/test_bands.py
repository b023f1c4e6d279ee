import json

from instruments.run_folders import write_run
from matplotlib.figure import Figure

from flowcorr.instruments.report.bands import band_charts
from flowcorr.instruments.report.runs import group_by_seed, read_run


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
    (curve,) = squares.draw.keywords["curves"]
    assert curve.mark == "step 1"
    first, second = ratios.draw.keywords["curves"]
    assert [curve.mark for curve in (first, second)] == ["step 0", "step 2"]
    assert first.band == [(step, 1.0, 1 - 0.01 * step, 1 + 0.01 * step) for step in (1, 2, 3)]
    assert second.band == [(step, 1.5, 1.5, 1.5) for step in (1, 2, 3)]
    ratios.draw(Figure())


def test_no_band_no_chart(tmp_path):
    assert charts_of(write_run(tmp_path / "run")) == []
