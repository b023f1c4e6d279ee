"""Pages from templates, and the files beside them."""

import io
import json
import re
from pathlib import Path

import pytest
from instruments.html_pages import Page
from rich.console import Console

from flowcorr.errors import BackendError
from flowcorr.health.finding import Finding
from flowcorr.instruments.drawing import Chart
from flowcorr.instruments.outcome import Charts, Column, Fact, Report, Table
from flowcorr.instruments.page import exit_code, save, show, write
from flowcorr.instruments.plots import Curve, draw_curves


@pytest.fixture
def chart():
    curve = Curve(mark="kl", colour="#000000", band=[(step, step, step, step) for step in range(3)])
    return Chart(name="drift", title="Drift", draw=draw_curves, data={"curves": [curve]})


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


@pytest.fixture
def report(chart):
    columns = [Column(name="preset", words=True), Column(name="rejected", show="{:.0%}".format)]
    return Report(
        title="Audit of <this>",
        verdict="the gap is large: close it",
        facts=[Fact(name="nats", value=2.0, text="2 joint nats"), Fact(name="D", value=4)],
        tables=[
            Table(
                name="presets",
                title="Presets",
                columns=columns,
                rows=[("one", 0.5), ("two", 0.0)],
                marks=("this", "idle"),
            )
        ],
        charts=[Charts(title="Curves", pictures={"drift": chart}, legend=[("A", "run one", "#000000")])],
        findings=[
            Finding(
                level="warning",
                cause="gap",
                sentence="a `gap` & more",
                numbers={"r": 0.1},
                remedy="look",
                keys="trainer:\n  seed: 1\n",
            )
        ],
    )


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_verdict_is_the_first_line_at_every_width(report, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, no_color=True, highlight=False)
    show(report, [Path("audit.json"), Path("a.png")], console)
    text = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())
    assert text.startswith(f"{report.verdict}\n")
    assert max(map(len, text.splitlines())) <= width
    for part in ("warning gap: A `gap` & more.", "-> Look.", "trainer.seed=1", "2 joint nats", "one", "50%"):
        assert part in text
    assert "1 more without effect here" in text  # the idle row
    assert "audit.json and 1 chart" in text


def test_findings_with_nothing_to_do_take_a_line_each():
    quiet = [
        Finding(level="healthy", cause=name, sentence="fine", numbers={"value": 0.5, "samples": (1.0, 2.0)})
        for name in ("a", "b")
    ]
    loud = Finding(level="serious", cause="c", sentence="broken", numbers={"value": 2.0}, remedy="mend it")
    console = Console(file=io.StringIO())
    show(Report(title="", verdict="one is broken", findings=[loud, *quiet]), console=console)
    assert console.file.getvalue().splitlines() == [
        "one is broken",
        "",
        "serious c: Broken.",
        "  (value 2)",
        "  -> Mend it.",
        "",
        "healthy a: Fine. (value 0.5, samples 1 2)",
        "healthy b: Fine. (value 0.5, samples 1 2)",
    ]


def test_a_report_is_saved_as_data_page_and_charts(report, tmp_path):
    files = save(report, tmp_path, "audit")
    assert [path.name for path in files] == ["audit.json", "audit.html", "drift.png"]
    data = json.loads(files[0].read_text())
    assert (data["verdict"], data["level"], data["facts"]["D"]) == (report.verdict, "warning", 4)
    page = Page(files[1])
    page.check_alone()
    for part in ("Audit of <this>", "A gap & more.", "trainer.seed=1", "Drift", "run one", "50%"):
        assert part in page.text
    assert page.text.index(report.verdict[1:]) < page.text.index("A gap & more.")


@pytest.mark.parametrize(("level", "code"), [("healthy", 0), ("note", 0), ("warning", 1), ("serious", 2)])
def test_the_exit_code_is_that_of_the_worst_finding(level, code):
    found = [Finding(level="healthy", cause="a", sentence="b"), Finding(level=level, cause="a", sentence="b")]
    assert exit_code(Report(title="", verdict="", findings=found)) == code


def test_a_folder_that_cannot_be_made_is_an_error(report, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match=r"folder/audit\.json .*--out"):
        save(report, tmp_path / "file" / "folder", "audit")
