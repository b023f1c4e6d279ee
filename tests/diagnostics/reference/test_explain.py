"""`flowcorr explain`."""

import pytest

from flowcorr.cli import main
from flowcorr.correction.presets import NAMES


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rollout_corr/k3_kl", "never negative"),
        ("rollout_corr/rejected_ratio", "outside: find the cause with `flowcorr doctor` first"),
        ("actor/rollout_corr/rollout_is_mean", "over the whole update"),
        ("rollout_corr/step_12/kl", "of step index"),
        ("reward/exact_match", "letter by letter"),
        ("actor.clip_ratio", "values: number | list of number; default: 0.001"),
        ("gap", "gap: the label of rollout_corr/logprob_abs_diff_mean"),
        ("clipped", "Share of scored terms whose ratio the loss cuts."),
        ("reward", "Mean training reward."),
        ("exact match", "reward/exact_match (metric"),
        ("geo_rs", "rollout_token_veto_threshold: 0.0001"),
    ],
)
def test_a_name_is_explained(name, text, capsys):
    assert main(["explain", name]) == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_preset_is_explained(name, capsys):
    assert main(["explain", name]) == 0
    assert f"{name} (preset, " in capsys.readouterr().out


def test_an_unknown_name_shows_near_ones(capsys):
    assert main(["explain", "rolout_corr/k3_kl"]) == 2
    assert "did you mean rollout_corr/k3_kl" in capsys.readouterr().err
