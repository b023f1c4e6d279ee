import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from flowcorr.config import load
from flowcorr.errors import BackendError
from flowcorr.instruments.gap_words import measurement, treatment
from flowcorr.instruments.progress import TerminalObserver
from flowcorr.instruments.report.learning import CONSTANT
from flowcorr.trainer import RunResult

BEFORE = {"eval/reward": 0.5, "eval/exact_match": 0.4, "eval/reward_std": 0.1, "eval/scored_images": 64.0}
AFTER = {"eval/reward": 0.9, "eval/exact_match": 0.8, "eval/reward_std": 0.1, "eval/scored_images": 64.0}


@pytest.fixture(params=[False, True], ids=["pipe", "terminal"])
def console(request):
    return Console(file=io.StringIO(), force_terminal=request.param, width=120, highlight=False)


def plain(console):
    """The text without the codes that move the cursor and set colours."""
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\r", "", console.file.getvalue())


def told(console, start):
    """The numbers by name on the last line with `start`: one for `name 0.5`, two for `name 0.5 -> 0.9`."""
    line = [line for line in plain(console).splitlines() if start in line][-1].partition(start)
    named = re.findall(r"([\w/]+) ([\d.]+)(?: -> ([\d.]+))?", line[1] + line[2])
    return {name: tuple(float(value) for value in values if value) for name, *values in named}


def follow(observer, *, result):
    """Tell the observer of a run of two steps."""
    observer.on_start(load("tiny_ocr_lora", ["trainer.total_steps=2"]), Path("runs/x"), 0)
    observer.on_eval(0, BEFORE)
    for step in (1, 2):
        observer.on_phase("rollout")
        observer.on_step(step, {"reward/mean": 0.25 * step, "actor/pg_clipfrac": 0.125})
    observer.on_eval(2, AFTER)
    observer.on_message("[red]not markup[/red]")
    observer.on_finish(result)


def test_a_run_tells_what_a_user_wants_to_know(console):
    finished = RunResult(status="finished", step=2, out_dir=Path("runs/x"), metrics=AFTER)
    with TerminalObserver(console) as observer:
        follow(observer, result=finished)
    text = console.file.getvalue()
    config = load("tiny_ocr_lora")
    assert f"{config.model.path} -> runs/x: 2 steps" in text
    assert treatment(config.algorithm.rollout_correction) in text
    assert told(console, "step 0") == {"step": (0,), "reward": (0.5,), "exact_match": (0.4,)}
    for step in (1, 2):
        line = told(console, f"step {step}/2")
        assert (line["step"], line["reward"], line["clipped"]) == ((step,), (0.25 * step,), (0.125,))
    assert told(console, "held out") == {"reward": (0.5, 0.9), "exact_match": (0.4, 0.8)}
    assert "[red]not markup[/red]" in text
    assert told(console, "finished")["step"] == (2,)


def test_an_evaluation_on_both_bases_tells_both_scores(console):
    scores = {
        "eval/reward": 0.5,
        "eval/image/dark": 0.1,
        "eval/served/reward": 0.4,
        "eval/served/image/dark": 0.1,
    }
    with TerminalObserver(console) as observer:
        observer.on_eval(0, scores)
    assert told(console, "eval") == {"step": (0,), "reward": (0.5,), "served/reward": (0.4,)}


@pytest.mark.parametrize(
    ("width", "fields"),
    [
        (60, ["reward 0.25", "exact match 0.5"]),
        (80, ["reward 0.25", "exact match 0.5", "gap 0.31 joint nats"]),
        (120, ["reward 0.25", "exact match 0.5", "gap 0.31 joint nats", "clipped 0.125"]),
    ],
)
def test_a_terminal_shows_the_fields_that_fit_and_a_file_all(width, fields):
    values = MEASURED | {"reward/mean": 0.25, "reward/exact_match": 0.5, "actor/pg_clipfrac": 0.125}
    lines = {}
    for live in (True, False):
        console = Console(file=io.StringIO(), force_terminal=live, width=width, highlight=False)
        with TerminalObserver(console) as observer:
            observer.on_start(load("tiny_ocr_lora", ["trainer.total_steps=100"]), Path("runs/x"), 0)
            observer.on_step(10, values)
        lines[live] = next(line for line in plain(console).split("\n") if "step 10/100" in line)
    assert lines[True].partition("step 10/100")[2].split("  ")[1:] == fields
    assert re.fullmatch(r"step 10/100  .*clipped 0\.125  .* s a step, .* left", lines[False])


def test_a_terminal_breaks_prose_between_words_and_no_command():
    console = Console(file=io.StringIO(), force_terminal=True, width=40, highlight=False)
    finished = RunResult(status="finished", step=2, out_dir=Path("runs/x"), metrics=AFTER)
    with TerminalObserver(console) as observer:
        follow(observer, result=finished)
    text = plain(console)
    assert "held out: reward 0.500 -> 0.900, \nexact_match 0.400 -> 0.800" in text
    assert "  flowcorr plan sd35_medium_ocr_lora --gpu rtx4090-24gb  " in text


def test_without_a_terminal_the_text_is_plain():
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    with TerminalObserver(console) as observer:
        follow(observer, result=RunResult(status="finished", step=2, out_dir=Path("runs/x"), metrics=AFTER))
    assert "\x1b" not in console.file.getvalue()


SIZE = {"rollout/num_elements": 512.0}
MEASURED = SIZE | {"rollout_corr/exact_kl": 3e-4, "rollout_corr/clip_noise_fraction": 0.11}


@pytest.mark.parametrize(
    ("recipe", "advised"),
    [("tiny_ocr_lora", "flowcorr audit tiny_ocr_lora"), (None, "flowcorr audit 'runs/my run/config.yaml'")],
)
def test_a_finished_run_ends_with_its_measurement(console, recipe, advised):
    out_dir = Path("runs/my run")
    with TerminalObserver(console, recipe=recipe) as observer:
        observer.on_start(load("tiny_ocr_lora", ["trainer.total_steps=1"]), out_dir, 0)
        observer.on_step(1, MEASURED)
        observer.on_finish(RunResult(status="finished", step=1, out_dir=out_dir, metrics={}))
    text = plain(console)
    assert told(console, "step 1/1")["gap"] == (0.31,)
    assert measurement(load("tiny_ocr_lora"), [MEASURED]) in " ".join(text.split())
    assert f"\n  {advised}  " in text


@pytest.mark.parametrize(("kl", "advised"), [(0.0, False), (3e-4, True)])
def test_after_a_gap_of_zero_no_audit_is_advised(console, kl, advised):
    with TerminalObserver(console) as observer:
        observer.on_start(load("tiny_ocr_lora", ["trainer.total_steps=1"]), Path("runs/x"), 0)
        observer.on_step(1, SIZE | {"rollout_corr/exact_kl": kl})
        observer.on_finish(RunResult(status="finished", step=1, out_dir=Path("runs/x"), metrics={}))
    assert ("flowcorr audit" in plain(console)) == advised
    assert "flowcorr report" in plain(console)


@pytest.mark.parametrize(("spread", "warned"), [(0.0, True), (0.1, False)])
def test_a_reward_that_is_constant_is_named_at_the_end(console, spread, warned):
    with TerminalObserver(console) as observer:
        observer.on_start(load("tiny_ocr_lora", ["trainer.total_steps=2"]), Path("runs/x"), 0)
        for step in (1, 2):
            observer.on_step(step, {"reward/mean": 0.25, "reward/std": spread})
        observer.on_finish(RunResult(status="finished", step=2, out_dir=Path("runs/x"), metrics={}))
    assert (CONSTANT in plain(console)) == warned


def test_a_resumed_run_sums_up_the_whole_run(console, tmp_path):
    measured = SIZE | {"reward/mean": 0.25, "reward/std": 0.0, "rollout_corr/exact_kl": 1e-4}
    earlier = [
        {"step": 0, **BEFORE},
        {"step": 1, **measured, "actor/grad_norm": None},
        {"step": 2, **measured, "rollout_corr/exact_kl": 9.0},  # after the checkpoint
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in earlier))
    with TerminalObserver(console) as observer:
        observer.on_start(load("tiny_ocr_lora", ["trainer.total_steps=2"]), tmp_path, 1)
        observer.on_step(2, {**measured, "rollout_corr/exact_kl": 3e-4})
        observer.on_eval(2, AFTER)
        observer.on_finish(RunResult(status="finished", step=2, out_dir=tmp_path, metrics=AFTER))
    assert told(console, "held out") == {"reward": (0.5, 0.9), "exact_match": (0.4, 0.8)}
    assert told(console, "gap 0") == {"gap": (0.2,)}  # not the line of a step
    assert CONSTANT in plain(console)


def test_what_is_unhealthy_is_told_once(console):
    with TerminalObserver(console) as observer:
        observer.on_start(load("tiny_ocr_lora"), Path("runs/x"), 0)
        for step in (1, 2):
            observer.on_step(step, {"rollout_corr/kl": 0.5, "rollout_corr/clip_noise_fraction": 0.9})
    text = console.file.getvalue()
    assert text.count("warning: ") == 1
    assert "metric rollout_corr/kl" in text
    assert told(console, "warning")["value"] == (0.5,)


def test_a_clip_range_below_the_noise_is_told_once(console):
    noisy = {"rollout_corr/clip_noise_fraction": 0.9, "rollout_corr/logprob_abs_diff_mean": 0.0047}
    with TerminalObserver(console) as observer:
        observer.on_start(load("tiny_ocr_lora_bypass"), Path("runs/x"), 0)
        for step in (1, 2, 3, 4):
            observer.on_step(step, noisy)
    text = " ".join(console.file.getvalue().split())
    assert text.count("warning: ") == 1
    assert "actor.clip_ratio=0.001" in text
    assert "0.0047" in text
    assert "`flowcorr audit`" in text


def test_an_interrupted_run_says_how_to_resume(console):
    result = RunResult(
        status="interrupted",
        step=1,
        out_dir=Path("runs/x"),
        metrics={},
        signal=signal.SIGINT,
        resume_command="flowcorr train runs/x/config.yaml --resume --out runs/x",
    )
    with TerminalObserver(console) as observer:
        observer.on_start(load("tiny_ocr_lora"), Path("runs/x"), 0)
        observer.on_finish(result)
    assert told(console, "interrupted")["step"] == (1,)
    assert f"{result.resume_command}\n" in console.file.getvalue()


def test_a_closed_output_is_an_error_without_a_traceback():
    console = Console(file=io.StringIO(), force_terminal=False)
    with TerminalObserver(console) as observer:
        console.file.close()
        with pytest.raises(BackendError, match=r"standard output .*> run\.log$"):
            observer.on_message("anybody there?")


def test_a_character_that_the_output_cannot_hold_is_no_closed_output():
    observer = TerminalObserver(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii")))
    with observer, pytest.raises(UnicodeEncodeError):
        observer.on_message("runs/\u5b9e\u9a8c")


def test_a_pipe_that_nobody_reads_is_an_error():
    reading, writing = os.pipe()
    os.close(reading)
    script = (
        "from flowcorr.instruments.progress import TerminalObserver\n"
        "with TerminalObserver() as observer:\n"
        "    observer.on_message('anybody there?')"
    )
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert "BackendError: standard" in done.stderr


def test_a_closed_terminal_is_left():
    """SIGHUP ends a run with its work saved, or does not where `nohup` forbids it; what it prints is no error."""
    script = (
        "import sys, warnings\n"
        "from flowcorr.instruments.progress import TerminalObserver\n"
        "with TerminalObserver() as observer:\n"
        "    observer.on_message('ready')\n"
        "    sys.stdin.read()\n"
        "    observer.on_message('anybody there?')\n"
        "    warnings.warn('this goes there, too')\n"
        "    print('and this')"
    )
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, text=True
    )
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        said = b""
        while b"ready" not in said:
            said += terminal.read(1000)
    process.communicate("", timeout=60)
    assert process.returncode == 0
