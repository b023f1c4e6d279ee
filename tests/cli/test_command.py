"""What every command does alike."""

import pytest

from flowcorr.cli import main
from flowcorr.cli.app import COMMANDS


def run(capsys, *arguments):
    """Exit code, stdout and stderr of `flowcorr *arguments`."""
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


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
    "arguments", [["train", "tiny_ocr_lora"], ["audit", "tiny_ocr_lora"], ["report", "x"]]
)
def test_an_out_without_a_name_is_refused(capsys, arguments):
    code, _, err = run(capsys, *arguments, "--out", "")
    assert (code, err.count("\n")) == (2, 1)
    assert "error: --out ''" in err
