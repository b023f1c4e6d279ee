"""Commands that only print."""

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


def test_presets_lists_all_names(capsys):
    code, out, err = run(capsys, "presets")
    assert (code, err) == (0, "")
    words = set(out.split())
    assert set(NAMES) <= words
    assert "0.999..1.001" in out
