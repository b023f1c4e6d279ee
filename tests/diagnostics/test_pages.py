"""Pages from templates, and the files beside them."""

import json
from functools import partial

import pytest
from diagnostics.html_pages import Page
from jinja2 import UndefinedError
from PIL import Image

from flowcorr.diagnostics.drawing import Chart
from flowcorr.diagnostics.pages import render, save_page, write
from flowcorr.diagnostics.plots import Curve, draw_curves
from flowcorr.errors import BackendError

VALUES = {
    "title": "Audit <of> this",
    "level": "note",
    "verdict": "no gap",
    "reasons": ["a & b"],
    "words": [],
    "suggestions": [],
    "facts": [],
    "charts": [],
    "tables": [],
}


@pytest.fixture
def chart():
    curve = Curve(mark="kl", colour="#000000", band=[(step, step, step, step) for step in range(3)])
    return Chart(name="drift", title="Drift", draw=partial(draw_curves, curves=[curve]))


def test_text_is_escaped_and_the_page_is_whole(tmp_path):
    path = tmp_path / "audit.html"
    path.write_text(render("audit.html", **VALUES), encoding="utf-8")
    page = Page(path)
    page.check_alone()
    assert "Audit <of> this" in page.text
    assert "a & b" in page.text


def test_a_value_that_is_missing_is_a_mistake():
    values = {name: value for name, value in VALUES.items() if name != "verdict"}
    with pytest.raises(UndefinedError, match="verdict"):
        render("audit.html", **values)


def test_data_page_and_charts_are_saved_together(tmp_path, chart):
    folder = tmp_path / "new" / "folder"
    files = save_page(folder, "audit", '{"kl": 0.1}', "<p>page</p>", [chart])
    assert [path.name for path in files] == ["audit.json", "audit.html", "drift.png"]
    assert json.loads(files[0].read_text()) == {"kl": 0.1}
    with Image.open(files[2]) as picture:
        assert picture.format == "PNG"


def test_a_link_in_the_place_of_a_page_is_replaced(tmp_path):
    """A stranger's folder may hold links under the names that are written."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("report.html", ".partial_report.html"):
        (tmp_path / name).symlink_to(precious)
    write(tmp_path / "report.html", "<p>page</p>")
    assert precious.read_text() == "mine"
    assert (tmp_path / "report.html").read_text() == "<p>page</p>"
    assert not (tmp_path / ".partial_report.html").is_symlink()


def test_half_a_character_does_not_keep_a_page_from_being_written(tmp_path):
    write(tmp_path / "page.html", "a \ud800 b")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "a ? b"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, chart):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match=r"the audit cannot be written to .*; give another --out DIR"):
        save_page(tmp_path / "file" / "folder", "audit", "{}", "", [chart])
