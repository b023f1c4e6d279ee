import json

import pytest

from flowcorr.cli import main
from flowcorr.cli.plan import gpu_counts

# The fake device has to be registered before a process computes its first gradient.
pytestmark = pytest.mark.fake_device


def test_plan_prints_a_row_a_phase_and_the_answers(capsys):
    assert main(["plan", "tiny_jpeg_lora", "--gpu", "l40s-48gb", "actor.micro_batch_size=8"]) == 0
    out = capsys.readouterr().out
    assert "tiny_jpeg_lora actor.micro_batch_size=8 on l40s-48gb: 47.6 GB" in out
    for name in ("load", "encode prompts", "sample", "decode", "recompute", "update", "sync", "step"):
        assert f"\n{name} " in out
    assert "Fits l40s-48gb" in out
    assert "actor.micro_batch_size=8 fits" in out


@pytest.mark.slow
def test_plan_prints_json_and_nothing_else(capsys):
    assert main(["plan", "tiny_jpeg_lora", "--json", "--ranks", "2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["ranks"] == 2
    assert plan["fits"]
    assert {phase["name"] for phase in plan["phases"]} >= {"load", "sample", "update"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h100"], "did you mean"),
        (["--gpu", ""], "--gpu='' is unknown"),
        (["--ranks", "0"], "at least 1"),
        (["--gpus", "8..2"], "must be a number of GPUs, or two"),
        (["--gpus", "many"], "must be a number of GPUs, or two"),
        (["--gpus", "8", "--ranks", "2"], "leave one of the two out"),
        (["--gpus", "8", "--cores", "0"], "at least 1"),
    ],
)
def test_plan_refuses_what_it_cannot_use(capsys, options, message):
    assert main(["plan", "tiny_jpeg_lora", *options]) == 2
    assert message in capsys.readouterr().err


def test_gpus_are_compared_with_the_lines_that_start_the_fastest_layout(capsys):
    options = ["rollout.name=vllm_omni", "--gpus", "2", "--cores", "4"]
    assert main(["plan", "tiny_ocr_lora", *options]) == 0
    out = capsys.readouterr().out
    for name in (
        "all train and sample",
        "train : sample, in turn (1 : 1)",
        "train : sample, a step ahead (1 : 1)",
    ):
        assert name in out
    assert "starts by:" in out
    assert "reward.num_workers=8" in out


@pytest.mark.slow
def test_a_range_of_gpus_shows_how_a_step_shrinks(capsys):
    assert main(["plan", "tiny_jpeg_lora", "--gpus", "1..4"]) == 0
    out = capsys.readouterr().out
    fitting = [line.partition(" yes ")[0].split() for line in out.splitlines() if " yes " in line]
    assert [words[-1] for words in fitting] == ["1", "2", "4"]
    assert "A step s" in out.splitlines()[-1]
    assert main(["plan", "tiny_jpeg_lora", "--gpus", "1..2", "--json"]) == 0
    assert {*json.loads(capsys.readouterr().out)} == {"1", "2"}


@pytest.mark.parametrize(
    ("text", "counts"), [("8", [8]), ("1..64", [1, 2, 4, 8, 16, 32, 64]), ("3..8", [3, 6])]
)
def test_counts_of_gpus_double(text, counts):
    assert gpu_counts(text) == counts


def test_help_teaches_how_to_read_a_plan(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = capsys.readouterr().out
    for word in ("examples:", "How to read it", "--gpu", "b200-180gb", "config.json"):
        assert word in out
