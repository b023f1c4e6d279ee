"""The table of presets."""

from flowcorr.cli import main
from flowcorr.correction.presets import NAMES


def test_presets_lists_all_names(capsys):
    assert main(["presets"]) == 0
    words = set(capsys.readouterr().out.split())
    assert set(NAMES) <= words
    assert "0.999..1.001" in words
