"""The files of the lab."""

import json

import pytest
from diagnostics.dumped_runs import CORRECTION, terms_of, write_run
from instruments.html_pages import Page, drawn

from flowcorr.diagnostics.lab import page, replay_run
from flowcorr.errors import BackendError


@pytest.fixture
def report(tmp_path):
    """Decoupled presets are turned, at the second step more than at the first."""
    parts = [terms_of(64, seed=1), terms_of(64, seed=2, shift=5.0)]
    return replay_run(write_run(tmp_path / "run <script>", parts, f"{CORRECTION}.preset=decoupled_seq_is"))


def test_the_page_stands_alone(report, tmp_path):
    files = page.save(report, tmp_path / "new")
    assert [file.name for file in files[:2]] == ["lab.json", "lab.html"]
    assert [file.stem for file in files[2:]] == [chart.name for chart in page.charts(report)]
    found = Page(files[1])
    found.check_alone()
    assert json.loads(files[0].read_text(encoding="utf-8"))["run_dir"].endswith("run <script>")
    assert "run <script>" in found.text
    assert report.reading in found.text
    assert "decoupled_seq_is (this run)" in found.text


def test_presets_without_a_row_have_a_reason(tmp_path):
    run_dir = write_run(tmp_path / "run", [terms_of(bypass=True)], f"{CORRECTION}.preset=bypass_ppo_clip")
    report = replay_run(run_dir)
    ((reason, names),) = page.reasons(report).items()
    assert "dump a run with bypass_mode=false" in reason
    assert "disabled" in names
    page.save(report, tmp_path)
    assert f"Not replayed: {', '.join(names)} ({reason})" in Page(tmp_path / "lab.html").text
    assert "lab_over_training" not in {chart.name for chart in page.charts(report)}  # of one step


def test_charts_have_a_row_a_preset_and_a_line_a_kind(report):
    charts = {chart.name: drawn(chart) for chart in page.charts(report)}
    labels = [label.get_text() for label in charts["lab_direction"].get_yticklabels()]
    assert len(labels) == len(report.replays)
    found = dict(zip(labels, charts["lab_terms"].collections[1].get_offsets()[:, 0], strict=True))
    changed = {replay.label: 100 * replay.outcome.changed_terms for replay in report.replays}
    assert found["decoupled_geo_rs"] == pytest.approx(changed["decoupled_geo_rs"])
    assert found["decoupled_seq_is (this run)"] == pytest.approx(changed["decoupled_seq_is"])
    lines = charts["lab_over_training"].lines
    assert list(lines[0].get_xdata()) == report.steps


def test_a_folder_that_cannot_be_made(report, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="give another --out DIR"):
        page.save(report, tmp_path / "file")
