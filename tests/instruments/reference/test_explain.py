"""`flowcorr explain`."""

import pytest

from flowcorr.cli import main
from flowcorr.correction.modes import RS_MODES
from flowcorr.correction.presets import NAMES
from flowcorr.health.table import RULES
from flowcorr.instruments.doctor.checks import CAUSES, CHECKS
from flowcorr.instruments.reference.explain import explanation
from flowcorr.instruments.reference.glossary import WORDS


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rollout_corr/k3_kl", "never negative"),
        ("rollout_corr/rejected_ratio", "outside: find the cause with `flowcorr doctor` first"),
        ("actor/rollout_corr/rollout_is_mean", "over the whole update"),
        ("rollout_corr/step_12/kl", "of step index"),
        ("reward/exact_match", "letter by letter"),
        ("actor.clip_ratio", "values: number | list of number; default: 0.001"),
        ("gap", "The gap, as every screen shows it"),
        ("clipped", "Share of scored terms whose ratio lies outside"),
        ("reward", "Mean training reward."),
        ("exact match", "reward/exact_match (metric"),
        ("geo_rs", "rollout_token_veto_threshold: 0.0001"),
        ("k3_kl", "rollout_corr/k3_kl (metric"),
        ("relative_gap", "rollout_corr/worker_<i>/relative_gap (metric"),
        ("logprob_abs_diff", "rollout_corr/step_<i>/logprob_abs_diff (metric"),
        ("clip_noise_fraction", "recompute old log-probs"),
        ("ESS", "worry: rollout_corr/rollout_is_eff_sample_size outside ≥ 0.3"),
        ("joint nats", "summed over all latent elements"),
        ("delta", "do: run `flowcorr doctor`"),
        ("auto", "`bypass_mode: auto` chooses"),
        ("step_z", "blind to a shift of the whole batch"),
        ("bypass", "worry: rollout_corr/clip_noise_fraction outside ≤ 0.1"),
        ("bypass_ppo_clip", "worry: rollout_corr/clip_noise_fraction outside ≤ 0.1"),
        ("decoupled_geo_rs", "worry: rollout_corr/rejected_ratio outside ≤ 0.05"),
        ("before", "rollout_corr/replay/before (metric"),
        ("seq_mean_k1", "Judges whole samples; takes a band of ratios"),
        ("flat_groups", "raise rollout.n"),
        ("reward_hacking", "drift of the images"),
    ],
)
def test_a_name_is_explained(name, text, capsys):
    assert main(["explain", name]) == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        *(check.name for check in CHECKS),
        *CAUSES,
        *RS_MODES,
        *(r.name for r in RULES),
        *WORDS,
    ],
)
def test_all_that_the_tools_name_is_explained(name):
    assert explanation(name)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_preset_says_when_to_worry(name):
    lines = [line.split(":")[0].strip() for line in explanation(name).splitlines()]
    assert lines.count("worry") == lines.count("do") >= 1


def test_a_name_with_several_senses_has_a_paragraph_for_each():
    (only,) = explanation("noise_scale").split("\n\n")
    assert only.startswith("noise_scale (cause")
    first, second = explanation("timesteps").split("\n\n")
    assert first.startswith("timesteps (check")
    assert second.startswith("timesteps (cause")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_preset_is_explained(name, capsys):
    assert main(["explain", name]) == 0
    assert f"{name} (preset, " in capsys.readouterr().out


def test_an_unknown_name_shows_near_ones(capsys):
    assert main(["explain", "rolout_corr/k3_kl"]) == 2
    assert "rollout_corr/k3_kl" in capsys.readouterr().err


OWN = """
from flowcorr.correction import Mode
from flowcorr.correction.modes import SQUARE
from flowcorr.health import Metric, Rule

FACES = Metric(
    name="reward/faces",
    meaning="Faces in an image.",
    unit="faces",
    rule=Rule(name="crowd", what="the number of faces", high=3.0, advice="ask for fewer"),
)


def reward(images, prompts):
    \"\"\"Counts faces.\"\"\"


def far(ratios):
    \"\"\"Distance of a step.\"\"\"
    return ratios.scaled.abs()


FAR = Mode(level="step", value=far, bounds=SQUARE)
CLIPPED = Metric(name="actor/pg_clipfrac", rule=Rule(name="far", what="them", high=0.3, advice="wait"))
"""


@pytest.mark.parametrize("printed", ["crowd", "faces", "reward/faces", "FACES"])
def test_a_metric_of_ones_own_is_known_by_the_names_that_tools_print(tmp_path, monkeypatch, capsys, printed):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows_to_explain.py").write_text(OWN)
    assert main(["explain", f"rows_to_explain:{printed}"]) == 0
    assert capsys.readouterr().out.startswith("reward/faces (metric, faces)")
    assert main(["explain", "crowd"]) == 2
    assert "my_module:crowd" in capsys.readouterr().err


def test_rows_of_ones_own_are_explained_by_their_fields(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows_to_explain.py").write_text(OWN)
    assert main(["explain", "rows_to_explain:FAR", "rows_to_explain:CLIPPED"]) == 0
    mode, metric = capsys.readouterr().out.split("\n\n")
    assert mode.splitlines()[0] == "rows_to_explain:FAR (a flowcorr.correction.Mode of your own)"
    assert "  level: step (" in mode
    assert "  value: far, Distance of a step. (" in mode
    assert explanation("actor/pg_clipfrac").splitlines()[1] in metric
    assert "≤ 0.3" in metric


def test_rows_and_code_of_ones_own_are_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows_to_explain.py").write_text(OWN)
    assert main(["explain", "rows_to_explain:FACES", "rows_to_explain:reward"]) == 0
    row, code = capsys.readouterr().out.split("\n\n")
    assert row.splitlines()[0] == "reward/faces (metric, faces)"
    for part in ("Faces in an image.", "≤ 3", "ask for fewer", "crowd"):
        assert part in row
    assert "Counts faces." in code
    assert main(["explain", "rows_to_explain:NOTHING"]) == 2
    assert "rows_to_explain:NOTHING" in capsys.readouterr().err


def test_a_name_that_is_unknown_keeps_none_of_the_others_back(capsys):
    assert main(["explain", "k3_kl", "nonsense", "clip range", "rubbish"]) == 2
    out, err = capsys.readouterr()
    assert out == f"{explanation('k3_kl')}\n\n{explanation('clip range')}\n"
    assert (err.count("\n"), "'nonsense'" in err, "'rubbish'" in err) == (1, True, True)
