"""The commands of the instruments; `flowcorr doctor`, `audit` and `report` have files of their own."""

import gc
import json

import pytest

from flowcorr.cli import main
from flowcorr.errors import ConfigError
from flowcorr.health.finding import Finding
from flowcorr.instruments.outcome import Report
from flowcorr.instruments.plan import preflight
from flowcorr.instruments.plan.answers import SHARED
from flowcorr.instruments.plan.report import exit_code


def test_plan_prints_a_row_a_phase_and_the_answers(capsys):
    assert main(["plan", "tiny_jpeg_lora", "--gpu", "l40s-48gb", "actor.micro_batch_size=8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("fits l40s-48gb")
    for name in ("load", "encode", "sample", "decode", "recompute", "update", "sync", "step"):
        assert f"\n{name} " in out


def test_plan_shows_no_secret_of_the_overrides(capsys):
    judge = "{name: vlm_judge, options: {base_url: 'http://me:hidden@host/v1', model: m}}"
    assert main(["plan", "tiny_jpeg_lora", f"reward.terms=[{judge}]", "rollout.n=2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "hidden" not in out + err
    assert json.loads(out)["title"] == "tiny_jpeg_lora reward.terms=*** rollout.n=2"


@pytest.mark.slow
def test_plan_prints_json_and_nothing_else(capsys):
    assert main(["plan", "tiny_jpeg_lora", "--json", "--ranks", "2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["facts"]["ranks"] == 2
    assert plan["facts"]["fits"]
    assert {row["phase"] for row in plan["tables"]["phases"]} >= {"sample", "update"}


def test_a_plan_that_does_not_fit_has_an_exit_code(capsys):
    gpu = "memory=0.03,bandwidth=100,bf16=10"
    assert main(["plan", "tiny_jpeg_lora", "actor.micro_batch_size=24", "--json", "--gpu", gpu]) == 2
    plan = json.loads(capsys.readouterr().out)
    assert (plan["facts"]["fits"], plan["level"]) == (False, "serious")


@pytest.mark.parametrize(
    ("levels", "code"),
    [
        ({"trainer_memory": "healthy", "micro_batch": "healthy"}, 0),
        ({"trainer_memory": "warning", "micro_batch": "warning"}, 1),
        ({"trainer_memory": "healthy", "engine_memory": "serious"}, 2),
        ({"trainer_memory": "healthy", SHARED: "warning"}, 0),
    ],
)
def test_the_exit_code_is_that_of_an_engine_on_its_own_gpu(levels, code):
    findings = [Finding(level=level, cause=cause, sentence="x") for cause, level in levels.items()]
    assert exit_code(Report(title="x", verdict="x", findings=findings)) == code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h100"], "did you mean"),
        (["--gpu", ""], "--gpu='' is unknown"),
        (["--ranks", "0"], "--ranks 0 is too few; use 1 or more"),
        (["--ranks", "9"], "rollout.prompts_per_step=8 leaves some of 9 ranks without a prompt"),
        (["--ranks", "3", "actor.fsdp=true"], "use a multiple of 3"),
    ],
)
def test_plan_refuses_what_it_cannot_use(capsys, options, message):
    assert main(["plan", "tiny_jpeg_lora", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("command", "option"), [("doctor", "--prompts"), ("audit", "--batches")])
def test_a_number_that_is_too_small_is_told_before_the_prompts_are_read(capsys, command, option):
    assert main([command, "tiny_ocr_lora", option, "0", "data.path=nowhere.txt"]) == 2
    assert f"error: {option} 0 is too few; use" in capsys.readouterr().err


def test_plan_collects_no_garbage_while_it_works(monkeypatch):
    found = []

    def stop(config):
        found.append(gc.isenabled())
        raise ConfigError("stop")

    monkeypatch.setattr(preflight, "check_settings", stop)
    assert main(["plan", "tiny_jpeg_lora"]) == 2
    assert found == [False]
    assert gc.isenabled()
