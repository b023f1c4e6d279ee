"""The files of an audit."""

import json
from dataclasses import replace

import pytest
from instruments.html_pages import Page, drawn

from flowcorr.correction.presets import NAMES
from flowcorr.diagnostics.audit import advice as rules
from flowcorr.diagnostics.audit import page
from flowcorr.errors import BackendError


def test_the_page_stands_alone(shared, tmp_path, evil):
    files = page.save(shared, tmp_path / "new", title=f"a {evil}")
    assert [file.name for file in files] == ["audit.json", "audit.html", "audit_gap.png"]
    found = Page(files[1])
    found.check_alone()
    assert json.loads(files[0].read_text(encoding="utf-8"))["recipe"] == f"a {evil}"
    assert f"Audit of a {evil}" in found.text
    assert rules.BASIS in found.text
    assert "no correction needed" in found.text
    assert "svg" in found.tags
    assert all(name in found.text for name in NAMES)


def test_the_charts_show_the_gap_and_what_is_rejected(shared):
    steps = [replace(step, abs_delta=(1e-3, 2e-3, 3e-3), clip_needed=1.2e-2) for step in shared.steps]
    rejecting = [replace(row, rejected_samples=0.25) for row in shared.presets[:2]]
    report = replace(shared, steps=steps, presets=[*rejecting, *shared.presets[2:]])
    gap, rejected = (drawn(chart) for chart in page.charts(report))
    assert gap.get_yscale() == "log"
    assert [text.get_text() for text in gap.texts] == ["50%", "90%", "99%", "needed", "clip"]
    assert [list(line.get_ydata()) for line in gap.lines] == [
        [value, value] for value in (1e-3, 2e-3, 3e-3, 1.2e-2, 1e-3)
    ]
    assert [label.get_text() for label in rejected.get_yticklabels()] == [row.name for row in rejecting]
    assert [text.get_text() for text in rejected.texts] == ["25%", "25%"]


def test_a_folder_that_cannot_be_made(shared, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="give another --out DIR"):
        page.save(shared, tmp_path / "file", title="recipe")
