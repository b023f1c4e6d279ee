"""`flowcorr lab` from the command to its files."""

import json

import pytest
import torch
from PIL import Image

from flowcorr import dumps
from flowcorr.cli import main
from flowcorr.config import load, to_yaml
from flowcorr.correction import PRESETS
from flowcorr.dumps import DumpedTerms, LoggedLoss


@pytest.fixture
def run_dir(tmp_path):
    """A bypass run with two dumped steps."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = load("tiny_ocr_lora_bypass", ["algorithm.rollout_correction.preset=bypass_ppo_clip"])
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    draw = torch.Generator().manual_seed(0)
    for step in (1, 2):
        rollout = torch.randn(16, 2, generator=draw)
        flat = torch.ones(16, 2)
        terms = DumpedTerms(
            rollout_log_probs=rollout,
            old_log_probs=rollout,
            current_log_probs=rollout + 1e-3 * torch.randn(16, 2, generator=draw),
            advantages=torch.randn(16, generator=draw),
            rewards=torch.rand(16, generator=draw),
            timesteps=900 * flat,
            sigmas=0.9 * flat,
            sigmas_next=0.8 * flat,
            stds=0.3 * flat,
            step_indices=torch.arange(2).repeat(16, 1),
            group_ids=torch.arange(16) // 4,
            policy_versions=torch.zeros(16, dtype=torch.int64),
            num_elements=512,
            bypass=True,
        )
        dumps.save(folder / dumps.FOLDER, step, terms, LoggedLoss())
    return folder


def test_a_run(run_dir, capsys):
    assert main(["lab", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 steps, 1 to 2: 32 samples of 2 SDE steps, D = 512; loss flow_grpo, bypass"
    assert lines[1].split() == [
        *("preset", "weight", "std", "largest", "ESS", "rejected", "samples", "clipped", "loss"),
        *("cosine", "lowest", "norm", "factors", "changed"),
    ]
    assert lines[2].startswith("bypass_ppo_clip (this run) ")
    assert lines[2].split()[-5:] == ["1.000", "1.000", "1.000", "1.00..1.00", "0.0%"]
    text = "\n".join(lines)
    assert all(name in text for name in PRESETS)
    assert "not replayed: decoupled_token_is, " in text
    assert "change only the gradient's length, which Adam ignores: bypass_ppo_clip, " in text
    saved = f"saved: {run_dir / 'lab.json'}, {run_dir / 'lab.html'}"
    assert lines[-1] == f"{saved} and 5 charts (.png) beside them"
    assert max(map(len, lines[:-1])) <= 140
    with Image.open(run_dir / "lab_direction.png") as picture:
        assert picture.format == "PNG"


def test_json_is_what_is_saved(run_dir, tmp_path, capsys):
    arguments = ["--presets", "bypass_pg_is,pg_rs", "--scales", "sqrt,2", "--out", str(tmp_path / "out")]
    assert main(["lab", str(run_dir), "--json", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "out" / "lab.json").read_text(encoding="utf-8")
    report = json.loads(printed)
    assert {(found["name"], found["scale"]) for found in report["replays"]} == {
        *(("bypass_pg_is", scale) for scale in ("mean", "sqrt", 2.0)),
        *(("pg_rs", scale) for scale in ("mean", "sqrt", 2.0)),
        ("bypass_ppo_clip", "mean"),
    }
    assert (tmp_path / "out" / "lab.html").is_file()
    assert not (run_dir / "lab.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--presets", "pg_iss"], "did you mean pg_is?"),
        (["--scales", "summ"], "did you mean sum?"),
        (["--scales", ""], "--scales='' is unknown; choose from mean, sqrt, sum, a positive number"),
    ],
)
def test_mistakes_are_one_line(run_dir, arguments, message, capsys):
    assert main(["lab", str(run_dir), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_names_may_have_spaces(run_dir, tmp_path):
    presets = ["--presets", "bypass_pg_is, pg_rs", "--scales", "mean, sqrt"]
    assert main(["lab", str(run_dir), *presets, "--out", str(tmp_path / "out")]) == 0


def test_what_is_no_run_and_what_has_no_dumps_say_what_to_do(run_dir, tmp_path, capsys):
    assert main(["lab", str(tmp_path / "nowhere")]) == 2
    assert (
        "holds no run (config.yaml is missing) and no dumped step; name the --out of flowcorr train"
        in capsys.readouterr().err
    )
    for path in (run_dir / dumps.FOLDER).iterdir():
        path.unlink()
    assert main(["lab", str(run_dir)]) == 2
    err = capsys.readouterr().err
    command = f"flowcorr train {run_dir}/config.yaml --resume --out {run_dir} trainer.dump_log_probs=true"
    assert f"{command} trainer.total_steps=40" in err
    assert err.count("\n") == 1


def test_a_folder_that_cannot_be_written(run_dir, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["lab", str(run_dir), "--out", str(tmp_path / "file")]) == 1
    assert "cannot be written to" in capsys.readouterr().err
