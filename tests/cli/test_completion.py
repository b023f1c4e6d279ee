"""Completion, tried in the shells themselves."""

import contextlib
import shutil
import subprocess
import sys

import pytest

from flowcorr.cli import main
from flowcorr.cli.app import COMMANDS
from flowcorr.cli.completion import SHELLS
from flowcorr.config import defaults, dotted, recipe_names

pytest.importorskip("shtab")

COMPLETE = """
source "$1"; shift
complete -p flowcorr >/dev/null || exit
COMP_WORDS=(flowcorr "$@") COMP_CWORD=$#
_flowcorr
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The scripts, by shell."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SHELLS:
        with (folder / shell).open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            assert main(["completion", shell]) == 0
    return {shell: folder / shell for shell in SHELLS}


@pytest.fixture
def completions(scripts, tmp_path):
    """Completions of the last word in bash, in a folder of two files and a folder."""
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "runs").mkdir()

    def complete(*words):
        command = ["bash", "--norc", "-c", COMPLETE, "bash", str(scripts["bash"]), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert not done.stderr
        return done.stdout.split()

    return complete


def test_commands(completions):
    assert completions("tr") == ["train", "translate"]
    assert completions("") == [command.name for command in COMMANDS]


def test_recipes_and_files(completions):
    assert completions("train", "wan") == ["wan_ocr_lora"]
    assert completions("audit", "") == [*recipe_names(), "mine.yaml", "runs"]
    assert completions("doctor", "--model", "mi") == ["mine.yaml"]
    assert completions("translate", "n") == ["notes.txt"]
    assert completions("eval", "") == ["runs"]
    assert completions("completion", "") == list(SHELLS)


def test_options(completions):
    assert completions("train", "tiny_ocr_lora", "--") == ["--help", "--out", "--resume"]


def test_keys_of_the_configuration(completions):
    every_key = [f"{key}=" for key in dotted(defaults())]
    assert completions("train", "tiny_ocr_lora", "") == every_key
    assert completions("train", "tiny_ocr_lora", "trainer.se") == ["trainer.seed="]
    # bash splits words at "="
    assert completions("eval", "runs", "--checkpoint", "last", "a", "=", "1", "data.p") == ["data.path="]
    assert completions("translate", "mine.yaml", "data.p") == []


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_read_their_script(shell, scripts):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    command = {
        "zsh": 'autoload -U compinit; compinit -D -u; eval "$(<$1)"; print $_comps[flowcorr]',
        "tcsh": f"source {scripts['tcsh']}; complete flowcorr",
    }
    done = subprocess.run(
        [shell, "-f", "-c", command[shell], shell, str(scripts[shell])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    assert {"zsh": "_shtab_flowcorr", "tcsh": "$flowcorr_recipes"}[shell] in done.stdout


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "shtab" in captured.err
    assert captured.err.endswith("pip install 'flowcorr[completion]'\n")
