"""`flowcorr doctor` and `trainer.doctor` on the embedded model, from the command to the exit code."""

import json
import re
from dataclasses import replace

import pytest

from flowcorr.cli import main
from flowcorr.rollout import InProcessEngine
from tests.shallow import SHALLOW

SMALL = [
    f"model.path={SHALLOW}",
    "sampling.height=16",
    "sampling.width=32",
    "rollout.n=2",
    "sampling.num_inference_steps=3",
    "sampling.sde_window_range=[0,2]",
    "data.num_train=8",
]


def doctor(*arguments):
    return main(["doctor", "tiny_jpeg_lora", *SMALL, *arguments])


@pytest.fixture
def half_bound(monkeypatch):
    """Every engine's adapter acts at half of its strength."""
    sync = InProcessEngine.sync

    def weaker(self, weights):
        halved = {name: value / 2 if "lora_B" in name else value for name, value in weights.tensors.items()}
        sync(self, replace(weights, tensors=halved))

    monkeypatch.setattr(InProcessEngine, "sync", weaker)


def test_a_healthy_recipe(capsys):
    assert doctor("--prompts", "2", "actor.clip_ratio=[1e-3, 2e-3]") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": 24 healthy")
    assert any(line.startswith("healthy bookkeeping: ") for line in lines)
    assert any("[0.001, 0.002]" in line for line in lines)
    assert max(map(len, lines)) <= 140


def test_a_gap_of_precision_is_no_agreement(capsys):
    assert doctor("rollout.emulate=int8", "--prompts", "2") == 0
    first = capsys.readouterr().out.splitlines()[0]
    found = re.search(r"no fault found: 25 healthy; .*velocities differ by ([\d.]+) %", first)
    assert float(found[1]) > 0


def test_json_is_all_that_is_printed(capsys, half_bound):
    assert doctor("rollout.emulate=int8", "--json", "--prompts", "2") == 2
    report = json.loads(capsys.readouterr().out)
    failed = [finding for finding in report["findings"] if finding["level"] == report["level"] == "serious"]
    assert [finding["cause"] for finding in failed] == ["lora"]
    assert failed == report["findings"][:1]
    assert failed[0]["numbers"]["value"] > failed[0]["numbers"]["limit"]
    assert [row["step_index"] for row in report["tables"]["noise_floor"]] == [0, 1]


def test_a_failure_comes_with_its_remedy(capsys, half_bound):
    assert doctor("rollout.emulate=int8", "--prompts", "2") == 2
    out = capsys.readouterr().out
    assert out.partition(",")[0].endswith("lora: 1 serious")
    assert "serious lora: " in out


@pytest.mark.parametrize("prompts", ["1", "-3"])
def test_too_few_prompts(prompts, capsys):
    assert doctor(f"--prompts={prompts}") == 2
    assert f"--prompts {prompts}" in capsys.readouterr().err


def test_training_begins_with_the_doctor(tmp_path, capsys):
    out = tmp_path / "run"
    assert train(out) == 0
    printed = capsys.readouterr().out
    assert printed.index("agree: ") < printed.index("eval at")
    plain = tmp_path / "plain"
    assert train(plain, "trainer.doctor=false") == 0
    assert "healthy" not in capsys.readouterr().out
    # The doctor leaves no trace in what is learned.
    assert losses(out) == losses(plain)


def test_training_stops_where_the_doctor_fails(tmp_path, capsys, half_bound):
    assert train(tmp_path / "run", "rollout.emulate=int8") == 1
    captured = capsys.readouterr()
    assert "serious lora: " in captured.out
    assert "disagree on lora" in captured.err
    assert json.loads((tmp_path / "run" / "doctor.json").read_text())["level"] == "serious"
    assert "eval at" not in captured.out


def train(out, *arguments):
    few = ["rollout.prompts_per_step=2", "data.num_heldout=4", "trainer.total_steps=1", "trainer.doctor=true"]
    return main(["train", "tiny_jpeg_lora", *SMALL, *few, "--out", str(out), *arguments])


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["actor/loss"] for record in records if "actor/loss" in record]


@pytest.mark.parametrize("option", [["--prompts", "2"], ["--float32"], ["--no-float32"]])
def test_options_of_an_examination_are_none_of_a_replay(option, tmp_path, capsys):
    assert main(["doctor", str(tmp_path), *option]) == 2
    assert "--prompts and --float32" in capsys.readouterr().err
