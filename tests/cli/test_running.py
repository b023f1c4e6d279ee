"""`flowcorr train`, `eval` and `export` on the embedded model, from the command to the exit code."""

import json
import os
import re
import shlex
import signal
import threading
import time

import pytest

from flowcorr.cli import main
from flowcorr.trainer import checkpoint
from flowcorr.trainer.events import read_events
from tests.trainer.test_fault import NAME, STEP, broken_by, wrong_log_probs

SMALL = [
    "rollout.prompts_per_step=2",
    "rollout.n=2",
    "sampling.num_inference_steps=4",
    "sampling.height=16",
    "sampling.width=32",
    "data.num_train=4",
    "data.num_heldout=2",
    "trainer.eval_num_inference_steps=2",
]


def train(out, *arguments):
    return main(["train", "tiny_jpeg_lora", *SMALL, "--out", str(out), *arguments])


def test_train_resume_and_eval(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    assert train(out, "trainer.total_steps=1", "--resume") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^held out: reward -?[\d.]+ ->", printed, re.MULTILINE)
    (start,) = (event for event in read_events(out / "events.jsonl") if event["kind"] == "start")
    assert start["says"].startswith(f"{out} holds")
    assert f"{start['says']}\n" in printed

    assert train(out, "trainer.total_steps=2") == 2
    assert f"{out} already holds" in capsys.readouterr().err
    assert train(out, "trainer.total_steps=2", "--resume", "actor.lr=1e-2") == 2
    assert re.findall(r"actor.lr was ([\d.]+), now ([\d.]+\d)", capsys.readouterr().err) == [
        ("0.0003", "0.01")
    ]

    # Without --out, the config.yaml of a run stands for its folder.
    assert main(["train", "run/config.yaml", "trainer.total_steps=2", "--resume"]) == 0
    printed = capsys.readouterr().out
    assert "resumes after step 1" in printed
    assert start["says"] not in printed
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert max(record["step"] for record in records) == 2

    assert main(["eval", str(out), "--checkpoint", "last"]) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert float(printed["eval/reward"]) == pytest.approx(records[-1]["eval/reward"], abs=1e-4)

    assert main(["export", str(out), "--checkpoint", "last"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[::4] == [f"{out}/export:", f"{out}/checkpoints/step_000002"]
    assert {line.strip() for line in lines[1:-1]} >= {"README.md", "adapter_config.json", "recipe.yaml"}
    assert lines[-1] == f"upload: hf upload run {out}/export ."
    assert main(["config", str(out / "export" / "recipe.yaml")]) == 0
    assert main(["export", str(out)]) == 2
    assert f"{out}/export" in capsys.readouterr().err


def interrupt_after_first_step(out, number=signal.SIGINT):
    """Send this process a signal, such as that of Ctrl-C, once the run in `out` has logged a training step."""
    log = out / "metrics.jsonl"
    while not (log.exists() and '"reward/mean"' in log.read_text(encoding="utf-8")):
        time.sleep(0.02)
    os.kill(os.getpid(), number)


def test_interrupt_saves_and_says_how_to_resume(tmp_path, capsys):
    out = tmp_path / "run"
    killer = threading.Thread(target=interrupt_after_first_step, args=(out,), daemon=True)
    killer.start()
    assert train(out, "trainer.total_steps=10000", "trainer.eval_every=0") == 128 + signal.SIGINT
    killer.join()
    printed = capsys.readouterr().out
    assert "SIGINT: " in printed

    step = int(re.search(r"^interrupted after step (\d+)", printed, re.MULTILINE)[1])
    (resume,) = re.findall(r"^resume with: flowcorr (.*)$", printed, re.MULTILINE)
    assert main([*shlex.split(resume), f"trainer.total_steps={step + 1}"]) == 0
    assert f"after step {step}" in capsys.readouterr().out


@pytest.mark.system
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGUSR1, 75), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP)],
)
def test_the_signal_by_which_a_scheduler_warns_asks_for_the_job_again(tmp_path, number, code):
    out = tmp_path / "run"
    killer = threading.Thread(target=interrupt_after_first_step, args=(out, number), daemon=True)
    killer.start()
    keys = ("trainer.total_steps=10000", "trainer.eval_every=0", "trainer.requeue=75")
    assert train(out, *keys, "--resume") == code
    killer.join()
    (*_, step) = checkpoint.steps(out / "checkpoints")
    assert train(out, *keys, f"trainer.total_steps={step}", "trainer.requeue=null", "--resume") == 0


def test_a_signal_while_the_model_loads_asks_for_the_job_again(tmp_path, capsys):
    reward = "reward.terms=[{name: 'tests.trainer.test_state:Interrupting'}]"  # by SIGUSR1
    assert train(tmp_path / "run", reward, "trainer.requeue=75") == 75
    assert capsys.readouterr().err.splitlines()[-1].startswith("flowcorr: SIGUSR1")


@pytest.mark.filterwarnings("always")
def test_fields_that_are_not_used_are_told_once(tmp_path, capsys):
    """Although a command reads its prompts several times."""
    path = tmp_path / "p.jsonl"
    lines = [
        {"prompt": text, "neg_prompt": "x", "negative_prompt": "y"} for text in ("cat", "elk", "bee", "owl")
    ]
    lines.append({"prompt": "dog", "caption": "a dog", "neg_prompt": "x", "edit_image": "dog.png"})
    path.write_text("\n".join(map(json.dumps, lines)))
    assert (
        train(tmp_path / "run", f"data.path={path}", "data.heldout_fraction=0.3", "trainer.total_steps=1")
        == 0
    )
    told = [line for line in capsys.readouterr().err.splitlines() if str(path) in line]
    assert [line.split(" lines is ")[0].split("field ")[-1] for line in told] == [
        '"neg_prompt" of 1 of 5',
        '"edit_image" of 1 of 5',
        told[2],
    ]
    assert "negative_prompt of " in told[2]
    assert "no effect: guidance is off at sampling.guidance_scale=1" in told[2]


def test_a_fault_of_the_engine_has_an_exit_code_and_a_screen(tmp_path, capsys, monkeypatch):
    broken_by(monkeypatch, wrong_log_probs)
    out = tmp_path / "run"
    assert train(out, NAME, "trainer.doctor=false", "trainer.total_steps=4") == 3
    printed = capsys.readouterr().out
    assert "log_prob_error" in printed
    assert f"flowcorr train {out / 'config.yaml'} --resume --out {out}" in printed.replace("\n", " ")
    assert checkpoint.folders(out / "checkpoints")[-1].name == f"step_{STEP - 1:06d}"
