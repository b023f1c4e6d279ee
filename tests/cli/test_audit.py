"""`flowcorr audit` on the embedded model, from the command to its files."""

import json
import shlex

import pytest
import yaml
from instruments.dumped_runs import terms_of, write_run

from flowcorr.cli import main
from flowcorr.config import load, recipe_names
from flowcorr.correction import PRESETS
from flowcorr.health.finding import as_overrides
from tests.shallow import SHALLOW

SMALL = [
    "rollout.n=4",
    "rollout.prompts_per_step=2",
    "sampling.num_inference_steps=3",
    "sampling.sde_window_range=[0,2]",
    "data.num_train=8",
    f"model.path={SHALLOW}",
    "sampling.height=16",
    "sampling.width=32",
]


def audit(*arguments):
    return main(["audit", "tiny_jpeg_lora", *SMALL, *arguments])


def test_a_recipe_without_a_gap(tmp_path, capsys):
    assert audit("--batches", "1", "--out", str(tmp_path)) == 0
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "audit.json").read_text())
    found = report["findings"][0]
    assert (found["level"], found["cause"]) == ("healthy", "gap")
    assert out.startswith(found["sentence"])
    idle = [row["preset"] for row in report["tables"]["presets"] if "(this run)" not in row["preset"]]
    assert set(idle) == set(PRESETS) - {"disabled"}  # which is this run
    assert not any(name in out for name in idle)
    assert f"{tmp_path / 'audit.html'} and 2 charts" in out


def test_json_is_what_is_saved(tmp_path, capsys):
    assert audit("rollout.emulate=int4", "--json", "--batches", "1", "--out", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed)
    assert printed == (tmp_path / "audit.json").read_text(encoding="utf-8")
    assert report["findings"][0]["cause"] == "gap"
    assert len(report["tables"]["scales"]) == 6
    assert [step["step_index"] for step in report["tables"]["steps"]] == [0, 1]
    assert "tiny_jpeg_lora rollout.n=4" in (tmp_path / "audit.html").read_text(encoding="utf-8")


def test_the_advice_can_be_trained_with(tmp_path, capsys):
    assert audit("rollout.emulate=int4", "--json", "--batches", "1", "--out", str(tmp_path)) == 0
    advice = json.loads(capsys.readouterr().out)["findings"]
    # The recipe recomputes old log-probs already; a wider clip range for bypass mode is the alternative.
    assert [found["cause"] for found in advice[:2]] == ["gap", "wider_clip"]
    assert ("change nothing" in advice[0]["sentence"], advice[0]["keys"]) == (True, "")
    recipe = tmp_path / "wider_clip.yaml"
    recipe.write_text(advice[1]["keys"], encoding="utf-8")
    loaded = load(recipe, SMALL)
    assert loaded.algorithm.rollout_correction.bypass_mode
    pasted = yaml.safe_load(advice[1]["keys"])["actor"]["clip_ratio"]
    assert loaded.actor.clip_ratio == tuple(pasted)
    assert len(pasted) == 2


@pytest.mark.filterwarnings("ignore:.*has no effect")
@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_takes_the_advice_as_overrides(tmp_path, recipe):
    lines = """\
actor:
  clip_ratio: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]  # by step index
algorithm:
  rollout_correction:
    rollout_is: token
    rollout_is_threshold: 2.0
    log_ratio_scale: sum
    rollout_rs: token_k1,step_z
    rollout_rs_threshold: [[0.99, 1.01], 6.0]
"""
    pasted = tmp_path / "pasted.yaml"
    pasted.write_text(lines, encoding="utf-8")
    expected = load(pasted)
    found = load(recipe, shlex.split(as_overrides(lines)))
    assert found.algorithm.rollout_correction == expected.algorithm.rollout_correction
    assert found.actor.clip_ratio == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


def test_dumps_of_one_name_keep_their_own_audits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, place in enumerate(("first", "second"), start=1):
        (tmp_path / place).mkdir()
        write_run(tmp_path / place / "dump", [terms_of()] * number)
        assert main(["audit", f"{place}/dump"]) == 0
    found = [
        json.loads((tmp_path / place / "dump" / "audit.json").read_text()) for place in ("first", "second")
    ]
    assert found[1]["facts"]["num_samples"] == 2 * found[0]["facts"]["num_samples"]


def test_a_folder_has_its_own_batches(tmp_path, capsys):
    write_run(tmp_path / "dump", [terms_of()])
    assert main(["audit", str(tmp_path / "dump"), "--batches", "99"]) == 2
    assert "--batches 99" in capsys.readouterr().err
    assert not (tmp_path / "dump" / "audit.json").exists()


def test_a_folder_takes_no_overrides_and_shows_no_secret_of_them(tmp_path, capsys):
    write_run(tmp_path / "dump", [terms_of()])
    assert main(["audit", str(tmp_path / "dump"), "a.api_key=hidden"]) == 2
    assert "so a.api_key=*** has no effect" in capsys.readouterr().err


def test_bad_batches(capsys):
    assert audit("--batches=0") == 2
    assert "--batches 0" in capsys.readouterr().err
