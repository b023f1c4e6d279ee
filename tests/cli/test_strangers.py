"""Runs and dumps of a stranger: `flowcorr report`, `audit` and `eval` read them, and run nothing unasked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from instruments.dumped_runs import terms_of, write_run
from instruments.html_pages import Page

from flowcorr.cli import main
from tests.odd_files import write_step

RAN = "the code of a stranger ran"
HELPERS = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
from flowcorr.correction.modes import RS_MODES
from flowcorr.losses import LOSSES
mode = RS_MODES["token_k2"]
def loss(terms, actor_config):
    return LOSSES["flow_grpo"].objective(terms, actor_config)
def reward(images, prompts):
    return [1.0] * len(prompts)
"""
OPTIONAL = (
    "brotli",
    "cuda",
    "dill",
    "flint",
    "gmpy2",
    "monkeytype",
    "opt_einsum",
    "pydot",
    "pynvml",
    "torchcomms",
)
ALLOW_LOSS = ("--allow-import", "helpers_of_a_stranger:loss")


def write_code(folder):
    """Code that a run names, and modules that libraries look for."""
    (folder / "helpers_of_a_stranger.py").write_text(HELPERS)
    for name in OPTIONAL:
        (folder / f"{name}.py").write_text(f"import sys; print({RAN!r}, __name__, file=sys.stderr)\n")


def ran(folder):
    return (folder / "helpers_of_a_stranger.ran").exists()


@pytest.fixture
def dump(tmp_path):
    """Dumped steps of a loss of their trainer's own."""
    for step in (1, 2):
        write_step(tmp_path / "dump", step, metadata={"loss_mode": "helpers_of_a_stranger:loss"})
    write_code(tmp_path / "dump")
    return tmp_path / "dump"


@pytest.fixture
def run(tmp_path):
    """A run with a loss, a rejection mode and a reward of its own, and a dumped step."""
    folder = write_run(tmp_path / "run", [terms_of()])
    (folder / "config.yaml").write_text(
        "actor: {loss_mode: 'helpers_of_a_stranger:loss'}\n"
        "algorithm: {rollout_correction: {rollout_rs: 'helpers_of_a_stranger:mode', rollout_rs_threshold: 1.0}}\n"
        "reward: {terms: [{name: 'helpers_of_a_stranger:reward'}]}\n"
    )
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    write_code(folder)
    return folder


@pytest.fixture(params=["dump", "run"])
def folder(request, monkeypatch):
    """Each of the two, as the working directory."""
    found = request.getfixturevalue(request.param)
    monkeypatch.chdir(found)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "helpers_of_a_stranger", raising=False)
    return found


@pytest.mark.parametrize("command", ["report", "audit"])
def test_a_page_names_the_loss_and_does_not_run_it(command, folder, tmp_path):
    assert main([command, ".", "--out", str(tmp_path)]) == 0
    assert not ran(folder)
    text = Page(tmp_path / f"{command}.html").text
    assert "ctor.loss_mode=helpers_of_a_stranger:loss" in text
    assert " ".join(ALLOW_LOSS) in text
    if command == "audit":
        found = json.loads((tmp_path / "audit.json").read_text())
        assert found["facts"]["loss_mode"] == "helpers_of_a_stranger:loss"
    assert main([command, ".", "--out", str(tmp_path), *ALLOW_LOSS]) == 0
    assert ran(folder)


def test_presets_are_replayed_where_the_loss_may_be_imported(folder, tmp_path):
    assert main(["audit", ".", "--out", str(tmp_path)]) == 0
    assert "presets" not in json.loads((tmp_path / "audit.json").read_text())["tables"]
    assert not ran(folder)
    names = [*ALLOW_LOSS, "--allow-import", "helpers_of_a_stranger:mode"]
    assert main(["audit", ".", "--out", str(tmp_path), *names]) == 0
    found = json.loads((tmp_path / "audit.json").read_text())
    presets = [row["preset"] for row in found["tables"]["presets"]]
    assert "disabled" in presets
    assert ("this run" in presets) == (folder.name == "run")
    assert ran(folder)


@pytest.mark.parametrize("folder", ["run"], indirect=True)
def test_eval_says_what_it_imports_before_it_does(folder, capsys, caplog):
    """This run has no checkpoint, which is found out before anything is imported."""
    assert main(["eval", "."]) == 1
    assert "no checkpoint" in capsys.readouterr().err
    (told,) = caplog.messages
    assert "reward.terms[0].name='helpers_of_a_stranger:reward'" in told
    assert str(folder / "helpers_of_a_stranger.py") in told
    assert not ran(folder)


def test_a_recipe_needs_no_leave(capsys):
    assert main(["audit", "tiny_ocr_lora", *ALLOW_LOSS]) == 2
    assert " ".join(ALLOW_LOSS) in capsys.readouterr().err


def test_libraries_find_no_code_in_the_folder_that_is_read(dump, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "flowcorr", "report", ".", "--out", str(tmp_path / "page.html")],
        cwd=dump,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.filterwarnings("default::UserWarning")
def test_names_of_a_stranger_do_not_reach_the_terminal_raw(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [])
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (folder / "images").mkdir()
    (folder / "images" / "eval_\x1b[31m.png").write_text("no image")
    assert main(["report", str(folder)]) == 0
    assert "eval_\\x1b[31m.png" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "audit", "eval"])
def test_what_may_not_be_looked_into_is_one_line(command, tmp_path, capsys, monkeypatch):
    """Root may look into every folder, so the system's answer is made up."""
    stat = os.stat

    def denied(path, *args, **kwargs):
        if "locked" in os.fspath(path) if isinstance(path, str | os.PathLike) else False:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", denied)
    assert main([command, str(tmp_path / "locked")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(tmp_path / "locked") in err
