"""On pipelines of the real classes: the embedded model is never asked about, since it fits everywhere."""

import re
import shlex

import pytest
import torch
from tiny_pipelines import build_tiny_sd3

from flowcorr.config import load
from flowcorr.correction import OFF
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.check import check_fit, check_this_gpu

ROOM = {"ranks": 1, "shared": True}


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    return [f"model.path={build_tiny_sd3(tmp_path_factory.mktemp('model') / 'sd3')}", "rollout.n=2"]


def test_a_run_that_fits_passes_without_a_word(overrides, recwarn):
    check_fit("tiny_jpeg_lora", overrides, load("tiny_jpeg_lora", overrides), memory=80e9, **ROOM)
    assert len(recwarn) == 0


def test_a_run_that_cannot_fit_is_stopped_with_the_numbers_and_what_would_fit(overrides):
    overrides = [*overrides, "rollout.batch_size=1", "actor.micro_batch_size=16"]
    with pytest.raises(ConfigError, match=r"^the run needs \d+\.\d MB .* 15\.0 MB\.") as raised:
        check_fit("tiny_jpeg_lora", overrides, load("tiny_jpeg_lora", overrides), memory=15e6, **ROOM)
    change, command = re.findall(r"`(.*?)`", str(raised.value))
    assert re.fullmatch(r"actor\.micro_batch_size=\d", change)
    assert command == shlex.join(["flowcorr", "plan", "tiny_jpeg_lora", *overrides])
    assert "bandwidth" not in str(raised.value)  # of which nothing is known


def test_a_plan_that_cannot_be_made_stops_nothing(overrides, caplog):
    overrides = [*overrides, "data.path=nowhere.txt"]
    check_fit("tiny_jpeg_lora", overrides, load("tiny_jpeg_lora", overrides), memory=8e6, **ROOM)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "nowhere.txt" in caplog.text


def test_without_a_gpu_nothing_is_asked(overrides):
    overrides = [*overrides, "trainer.device=cpu", "data.path=nowhere.txt"]
    check_this_gpu("tiny_jpeg_lora", overrides, load("tiny_jpeg_lora", overrides))


def test_a_check_leaves_the_training_that_follows_as_it_is(make_run):
    model = {"model": {"path": "tiny_ocr"}}
    random = torch.get_rng_state()
    check_fit("tiny_ocr_lora", [], load("tiny_ocr_lora"), memory=80e9, **ROOM)
    assert torch.equal(torch.get_rng_state(), random)
    run = make_run(**model)
    batch = run.batch()
    before = run.actor.log_probs(batch.rollout).log_probs
    check_fit("tiny_ocr_lora", [], load("tiny_ocr_lora"), memory=80e9, **ROOM)
    assert torch.equal(run.actor.log_probs(batch.rollout).log_probs, before)
    assert run.actor.update(batch, OFF, training_step=1).metrics.compute()["actor/updates"] == 1
