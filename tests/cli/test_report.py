import shutil

import pytest
from instruments.foreign_dumps import draw_steps
from instruments.html_pages import Page
from PIL import Image

from flowcorr.cli import main
from flowcorr.config import load, to_yaml


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(load("tiny_ocr_lora")), encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n', encoding="utf-8")
    return folder


def test_the_page_lies_in_the_first_run(run_dir, tmp_path, capsys):
    other = shutil.copytree(run_dir, tmp_path / "other")
    assert main(["report", str(run_dir), str(other)]) == 0
    verdict, *_, last = capsys.readouterr().out.splitlines()
    assert "unknown in 2" in verdict
    assert last == f"saved: {run_dir / 'report.html'}"
    assert "run, other" in (run_dir / "report.html").read_text(encoding="utf-8")


def test_the_page_goes_where_it_is_wanted(run_dir, tmp_path):
    assert main(["report", str(run_dir), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file()
    assert not (run_dir / "report.html").exists()


@pytest.mark.parametrize("folder", ["shared", "shared.d/"])
def test_a_folder_gets_the_charts_as_well(run_dir, folder, tmp_path, capsys):
    out = tmp_path / folder
    assert main(["report", str(run_dir), "--out", str(out)]) == 0
    assert f"{out / 'report.json'}, {out / 'report.html'}" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json", "reward_mean.png"]
    with Image.open(out / "reward_mean.png") as picture:
        assert picture.format == "PNG"


def test_what_is_no_run_is_named(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert str(tmp_path) in err
    assert "config.yaml" in err


def test_a_folder_of_another_trainer_is_a_run(tmp_path):
    """With findings by the health rules, and a note for each field that is missing."""
    folder = draw_steps(tmp_path / "dump", without=("sigmas",))
    assert main(["report", str(folder)]) == 0
    text = Page(folder / "report.html").text
    assert "clip_noise" in text
    assert "dumped: sigmas" in text
