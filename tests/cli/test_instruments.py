"""The commands of the instruments; `flowcorr doctor`, `audit` and `report` have files of their own."""

import gc
import json

import pytest

from flowcorr.cli import main
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan import preflight


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h100"], "did you mean"),
        (["--gpu", ""], "--gpu='' is unknown"),
        (["--ranks", "0"], "at least 1"),
        (["--ranks", "9"], "rollout.prompts_per_step=8 leaves some of 9 ranks without a prompt"),
        (["--ranks", "3", "actor.fsdp=true"], "use a multiple of 3"),
    ],
)
def test_plan_refuses_what_it_cannot_use(capsys, options, message):
    assert main(["plan", "tiny_jpeg_lora", *options]) == 2
    assert message in capsys.readouterr().err


def test_plan_collects_no_garbage_while_it_works(monkeypatch):
    found = []

    def stop(config):
        found.append(gc.isenabled())
        raise ConfigError("stop")

    monkeypatch.setattr(preflight, "check_settings", stop)
    assert main(["plan", "tiny_jpeg_lora"]) == 2
    assert found == [False]
    assert gc.isenabled()
