"""Commands that only print."""

import pytest

from flowcorr.cli import main
from flowcorr.config import load
from flowcorr.correction.presets import NAMES


def run(capsys, *arguments):
    """Exit code, stdout and stderr of `flowcorr *arguments`."""
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_config_prints_what_load_reads(capsys, tmp_path):
    code, out, err = run(capsys, "config", "tiny_ocr_lora", "trainer.seed=5")
    path = tmp_path / "config.yaml"
    path.write_text(out, encoding="utf-8")
    assert (code, err) == (0, "")
    assert load(path) == load("tiny_ocr_lora", ["trainer.seed=5"])


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
    assert err.splitlines()[-1].startswith("flowcorr: error: data.path='nowhere.txt' does not exist")


@pytest.mark.filterwarnings("default:flowcorr train would stop here")
def test_config_prints_a_recipe_whose_prompts_are_elsewhere(capsys):
    code, out, err = run(capsys, "config", "tiny_ocr_lora", "data.path=nowhere.txt")
    assert (code, out.startswith("model:\n")) == (0, True)
    assert err.startswith(
        "flowcorr: warning: flowcorr train would stop here: data.path='nowhere.txt' does not"
    )


@pytest.mark.parametrize(
    "arguments", [["train", "tiny_ocr_lora"], ["audit", "tiny_ocr_lora"], ["report", "x"]]
)
def test_an_out_without_a_name_is_refused(capsys, arguments):
    code, _, err = run(capsys, *arguments, "--out", "")
    assert (code, err) == (2, "flowcorr: error: --out '' names no folder; give one, or leave --out away\n")


def test_presets_lists_all_names(capsys):
    code, out, err = run(capsys, "presets")
    assert (code, err) == (0, "")
    words = set(out.split())
    assert set(NAMES) <= words
    assert "0.999..1.001" in out
