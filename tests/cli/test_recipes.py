"""Commands that print recipes, and what every command refuses."""

import pytest

from flowcorr.config import load
from tests.cli.commands import run


def test_config_prints_what_load_reads(capsys, tmp_path):
    code, out, err = run(capsys, "config", "tiny_ocr_lora", "trainer.seed=5")
    path = tmp_path / "config.yaml"
    path.write_text(out, encoding="utf-8")
    assert (code, err) == (0, "")
    assert load(path) == load("tiny_ocr_lora", ["trainer.seed=5"])


@pytest.mark.filterwarnings("default:flowcorr train would stop here")
def test_config_prints_a_recipe_whose_prompts_are_elsewhere(capsys):
    code, out, err = run(capsys, "config", "tiny_ocr_lora", "data.path=nowhere.txt")
    assert (code, out.startswith("model:\n")) == (0, True)
    assert "warning: " in err
    assert "data.path='nowhere.txt'" in err
