"""The folder of a run: who owns it, and what may change when it is resumed."""

import math
import re
import shutil
import subprocess
import sys

import pytest

from flowcorr import config, trainer
from flowcorr.errors import BackendError, CheckpointError, ConfigError
from flowcorr.trainer import run_folder
from flowcorr.trainer.events import EventLog, read_events
from tests.trainer.runs import small_config


def test_a_used_folder_needs_resume(finished):
    with pytest.raises(ConfigError, match=f"^{finished} .*--resume, "):
        trainer.train(small_config(), finished)


def test_claim_names_the_keys_that_differ(tmp_path):
    run_folder.claim(tmp_path, small_config(), resume=False)
    run_folder.claim(tmp_path, small_config("actor.lr=1e-2"), resume=False)  # nothing was trained in it yet
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    changed = small_config(
        "actor.lr=1.0", "model.lora.rank=8", "trainer.total_steps=9", "trainer.eval_every=1"
    )
    with pytest.raises(ConfigError) as caught:
        run_folder.claim(tmp_path, changed, resume=True)
    assert "another configuration" in str(caught.value)
    named = re.findall(r"([\w.]+) was ([\d.]+), now ([\d.]+\d|\d)", str(caught.value))
    assert named == [("actor.lr", "0.01", "1.0"), ("model.lora.rank", "4", "8")]
    longer = small_config("actor.lr=1e-2", "trainer.total_steps=9")
    run_folder.claim(tmp_path, longer, resume=True)
    assert config.load(tmp_path / "config.yaml").trainer.total_steps == 4  # not yet known to go on
    run_folder.write_config(tmp_path, longer)
    assert config.load(tmp_path / "config.yaml").trainer.total_steps == 9


@pytest.mark.parametrize(
    "override",
    [
        "reward.on_error=drop_group",
        "rollout.replay_every=0",
        "rollout.batch_size=1",
        "model.offload_text_encoders=true",
        "actor.micro_batch_size=1",
        "rollout.engine.weight_sync=lora_path",
        "reward.terms=[{name: pickscore, options: {device: cpu}}]",
        "reward.terms=[{name: pickscore, options: {device: cuda, batch_size: 4}}]",
    ],
)
def test_what_errors_advise_may_change(tmp_path, override):
    begun = (
        "trainer.device=cuda",
        "rollout.name=vllm_omni",
        "reward.terms=[{name: pickscore, options: {device: cuda}}]",
    )
    run_folder.claim(tmp_path, small_config(*begun), resume=False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    run_folder.claim(tmp_path, small_config(*begun, override), resume=True)
    with pytest.raises(ConfigError, match=r"rollout\.n was 2, now 3"):
        run_folder.claim(tmp_path, small_config(*begun, override, "rollout.n=3"), resume=True)


@pytest.mark.parametrize(
    ("section", "name", "address", "scores"),
    [
        ("terms", "http", "url", "format: npz"),
        ("gold", "vlm_judge", "model: m, base_url", "max_tokens: 64"),
    ],
)
def test_a_service_may_move_and_be_asked_otherwise_but_not_score_otherwise(
    tmp_path, section, name, address, scores
):
    """As errors advise, and as a server that each job starts anew needs."""

    def config_of(port, options=""):
        options = f"{address}: 'http://127.0.0.1:{port}'{options}"
        return small_config(f"reward.{section}=[{{name: {name}, options: {{{options}}}}}]")

    run_folder.claim(tmp_path, config_of(8000), resume=False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    changed = ", timeout: 300, retries: 9, verify: false"
    run_folder.claim(tmp_path, config_of(9000, changed), resume=True)
    option, value = scores.split(": ")
    with pytest.raises(ConfigError, match=f"reward.{section} was .*{option}.*{value}"):
        run_folder.claim(tmp_path, config_of(9000, f"{changed}, {scores}"), resume=True)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ("trainer.best_metric=eval/rewrad", "trainer.total_steps=9"),
            r"trainer\.best_metric='eval/rewrad' ",
        ),
        (("trainer.total_steps=3",), r"trainer\.total_steps=3 .* 4 steps"),
    ],
)
def test_a_resume_that_is_refused_leaves_configuration_and_failure_as_they_were(finished, overrides, named):
    (finished / "failure.txt").write_text("before")
    before = (finished / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=named):
        trainer.train(small_config(*overrides), finished, resume=True)
    assert (finished / "failure.txt").read_text() == "before"
    assert (finished / "config.yaml").read_bytes() == before
    failure = read_events(finished / "events.jsonl")[-1]
    assert (failure["kind"], failure["step"]) == ("failure", 4)


def test_a_run_without_its_checkpoints_is_not_started_again(finished):
    shutil.rmtree(finished / "checkpoints")
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"checkpoints .*metrics\.jsonl .* step 4, "):
        trainer.train(small_config(), finished, resume=True)
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("reward.terms", "reward.terms=[{{name: http, options: {{url: 'http://a', api_key: {}}}}}]"),
        ("rollout.engine.hf_token", "rollout.engine={{hf_token: {}}}"),
    ],
)
def test_claim_names_a_changed_secret_and_does_not_tell_it(tmp_path, key, secret):
    def settings(value):
        return small_config("rollout.name=vllm_omni", secret.format(value))

    run_folder.claim(tmp_path, settings("s3cret"), resume=False)
    assert config.load(tmp_path / "config.yaml") == settings("s3cret")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match=f"{key} was ") as caught:
        run_folder.claim(tmp_path, settings("s3cret too"), resume=True)
    assert str(caught.value).count('"***"') == 2
    assert "s3cret" not in str(caught.value)


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    """Until the first is killed, even if a process that it has forked lives on."""
    code = "import os, sys, pathlib; from flowcorr.trainer import run_folder\n"
    code += "with run_folder.locked(pathlib.Path(sys.argv[1])):\n"
    code += "    os.fork() or print('mine', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "mine\n"
    with pytest.raises(ConfigError, match=f"another process .* {tmp_path};"):
        trainer.train(small_config(), tmp_path)
    other.kill()  # as whatever ended it without a chance to tidy up
    other.wait()
    with run_folder.locked(tmp_path):
        pass
    other.communicate()  # ends the forked process, which reads to the end of its input


def test_a_folder_with_files_of_something_else_is_left_as_it_is(tmp_path):
    for name in ("config.yaml", "b.py", "a.txt", "c"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=rf"^{tmp_path} .*\(a\.txt, b\.py, c, \.\.\.\);"):
        trainer.train(small_config(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.py", "c", "config.yaml"]


@pytest.mark.parametrize("name", ["train.log", "slurm-1.out", "events.jsonl", ".lock"])
def test_a_folder_of_a_run_may_hold_other_files_later(tmp_path, name):
    (tmp_path / name).write_text("")
    with run_folder.locked(tmp_path):
        (tmp_path / "report.html").write_text("")
    with run_folder.locked(tmp_path):
        pass


def test_claim_refuses_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/run .*Not a directory"):
        run_folder.claim(tmp_path / "file" / "run", small_config(), resume=False)


def test_a_failure_that_cannot_be_noted_does_not_hide_the_failure(tmp_path, caplog):
    run_folder.write_failure(tmp_path / "gone", "reason")
    assert str(tmp_path / "gone" / "failure.txt") in caplog.text


def test_the_record_of_a_step_has_its_metrics_with_nan_for_null(tmp_path):
    lines = '{"step": 1, "a": 2.0}\n{"step": 2, "a": 3.0, "b": null}\n{"step": 2, "c": 4}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert run_folder.record_of(tmp_path, 2) == pytest.approx({"a": 3.0, "b": math.nan, "c": 4}, nan_ok=True)
    assert run_folder.record_of(tmp_path, 3) == {}


def test_files_that_may_hold_a_secret_are_their_owners(tmp_path):
    """Also in the folder of a run that an older flowcorr began."""
    old = ("metrics.jsonl", "events.jsonl", "failure.txt", "config.yaml")
    for name in old:
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o644)
    config = small_config("trainer.total_steps=1", "reward.terms=[{name: http, options: {api_key: s3cret}}]")
    with pytest.raises(ConfigError, match="^reward http .* api_key: ") as caught:
        trainer.train(config, tmp_path)
    written = {path.name: path for path in tmp_path.iterdir()}
    assert {"config.yaml", "events.jsonl", "failure.txt"} <= written.keys()
    for name in ("config.yaml", "events.jsonl", "failure.txt"):
        assert written[name].stat().st_mode & 0o777 == 0o600, name
    for name in ("events.jsonl", "failure.txt"):
        assert str(caught.value).partition(":")[0] in written[name].read_text()
        assert "s3cret" not in written[name].read_text()


def test_the_files_of_a_finished_run_are_their_owners(finished):
    for name in ("config.yaml", "metrics.jsonl", "events.jsonl", "checkpoints/step_000002/state.json"):
        assert (finished / name).stat().st_mode & 0o777 == 0o600, name


def test_a_failure_that_names_a_file_of_broken_bytes_is_noted(tmp_path):
    raised = pytest.raises(BackendError, match=r"caf\udce9\.png")
    with raised, EventLog(tmp_path) as events, run_folder.failure_noted(tmp_path, events):
        raise BackendError("caf\udce9.png cannot be read")
    assert "BackendError: caf\\udce9.png cannot be read" in (tmp_path / "failure.txt").read_text()
    assert read_events(tmp_path / "events.jsonl")[-1]["kind"] == "failure"
