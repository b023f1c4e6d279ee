"""What every command does alike."""

import re

import pytest

from flowcorr.cli.app import COMMANDS
from flowcorr.cli.command import writable_file, writable_folder
from tests.cli.commands import run


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_is_told_from_its_docstring(command):
    assert 0 < len(command.summary) < 90
    assert command.summary not in command.description
    assert "Examples:\n  flowcorr " in command.description or command.name == "presets"


@pytest.mark.parametrize("command", ["config", "plan", "doctor", "audit", "train"])
@pytest.mark.parametrize("override", ["trainer.trackers=[x]", "trainer.device=gpu", "sampling.height=17"])
def test_every_command_refuses_what_training_would(capsys, command, override):
    code, out, err = run(capsys, command, "tiny_ocr_lora", override)
    assert (code, out.removeprefix("loading tiny_ocr_lora\n")) == (2, "")
    assert err.startswith(f"flowcorr: error: {override.partition('=')[0]}=")


@pytest.mark.parametrize("command", ["plan", "doctor", "audit", "train"])
def test_prompts_that_are_not_there_end_a_command_that_needs_them(capsys, command):
    code, out, err = run(capsys, command, "tiny_ocr_lora", "data.path=nowhere.txt")
    assert (code, out.removeprefix("loading tiny_ocr_lora\n")) == (2, "")
    assert err.splitlines()[-1].startswith("flowcorr: error: data.path='nowhere.txt'")


@pytest.mark.parametrize(
    "arguments", [["train", "tiny_ocr_lora"], ["audit", "tiny_ocr_lora"], ["report", "."]]
)
def test_an_out_without_a_name_is_refused(capsys, arguments):
    code, _, err = run(capsys, *arguments, "--out", "")
    assert (code, err.count("\n")) == (2, 1)
    assert "error: --out ''" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "tiny_ocr_lora"],
        ["audit", "tiny_ocr_lora"],
        ["audit", "folder"],
        ["report", "folder"],
        ["export", "folder"],
    ],
)
@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("file", "it is a file"),
        ("file/below", "directory|exists"),
        ("/proc/nothing/here", "No such file|Permission|Read-only"),
    ],
)
def test_an_out_that_cannot_be_written_is_told_before_the_work(
    capsys, tmp_path, monkeypatch, arguments, out, reason
):
    """Nothing is read before: the folder is empty, which is an error of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    code, _, err = run(capsys, *arguments, "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(f"error: --out {out} cannot be written: .*({reason})", err)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_the_page_of_a_report_is_no_folder(capsys, tmp_path):
    (tmp_path / "page.html").mkdir()
    code, _, err = run(capsys, "report", str(tmp_path), "--out", str(tmp_path / "page.html"))
    assert (code, "it is a folder, and should be a file" in err) == (2, True)


def test_an_attempt_to_write_leaves_nothing(tmp_path):
    (tmp_path / "old").mkdir()
    assert writable_folder(str(tmp_path / "new" / "run"), tmp_path) == tmp_path / "new" / "run"
    assert writable_folder(None, tmp_path / "old") == tmp_path / "old"
    assert writable_file(str(tmp_path / "pages" / "a.html"), tmp_path) == tmp_path / "pages" / "a.html"
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]


@pytest.mark.parametrize("command", ["audit", "doctor", "report", "eval", "export"])
def test_a_folder_that_is_not_there_is_said_to_be_none(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, command, "gone")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(r"gone'?:? (does not exist|no such file or folder)", err)
    assert list(tmp_path.iterdir()) == []
