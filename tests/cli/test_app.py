import contextlib
import os
import shlex
import subprocess
import sys

import pytest

from flowcorr import __version__
from flowcorr.cli import app, main
from flowcorr.cli.app import build_parser
from flowcorr.config import recipe_names
from tests.cli.commands import run

COMMANDS = [command.name for command in app.COMMANDS]


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
def test_help_fits_a_terminal(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120


def test_a_missing_recipe_is_all_that_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        main(["audit"])
    assert capsys.readouterr().err.endswith(": RECIPE\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"\n  flowcorr {command.replace('presets', 'train')} " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "config"])
def test_help_lists_the_recipes(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert set(recipe_names()) <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "tiny_ocr_lra"], "did you mean tiny_ocr_lora?"),
        (["config", "tiny_ocr_lora", "actor.lrr=1"], "did you mean actor.lr?"),
        (["train", "tiny_ocr_lora", "rollout.n=1"], "rollout.n=1 leaves every advantage at 0"),
        (["eval", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_bad_configuration_is_one_line_and_exit_code_2(arguments, message, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, out.removeprefix("loading tiny_ocr_lora\n")) == (2, "")
    assert err.startswith("flowcorr: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["presets", "a=1"],
        ["config", "tiny_ocr_lora", "--sed=1"],
        ["config", "tiny_ocr_lora", "seed"],
    ],
)
def test_bad_usage_exits_with_2(arguments, capsys):
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (["trian", "tiny_ocr_lora"], "train"),
        (["config", "tiny_ocr_lora", "--trainer.seed=1"], "trainer.seed=1"),
        (["train", "tiny_ocr_lora", "--steps", "3"], "trainer.total_steps=3"),
        (["config", "tiny_ocr_lora", "--fold_steps"], "actor.fold_steps=true"),
        (["config", "tiny_ocr_lora", "+trainer.seed=1"], "trainer.seed=1"),
        (["plan", "tiny_ocr_lora", "--gpu", "4090"], "rtx4090-24gb"),
        (["plan", "tiny_ocr_lora", "--gpu", "RTX 4090"], "rtx4090-24gb"),
        (["--verison"], "--version"),
    ],
)
def test_a_wrong_word_is_told_the_right_one(arguments, instead, capsys):
    with contextlib.suppress(SystemExit):
        main(arguments)
    error = capsys.readouterr().err
    assert f"(did you mean {instead}?)" in error or f"; write {instead} (" in error


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tiny_ocr_lora", "trainer.seed=1"], "flowcorr train tiny_ocr_lora trainer.seed=1"),
        (["recipes/tiny_ocr_lora.yaml"], "flowcorr train recipes/tiny_ocr_lora.yaml"),
        (["help"], "flowcorr --help"),
        (["help", "plan"], "flowcorr plan --help"),
        (["RUN"], "flowcorr report RUN"),
        (["doctor", "RUN"], "flowcorr doctor RUN/config.yaml"),
        (["eval", "RUN/config.yaml"], "(did you mean RUN?)"),
        (["report", "RUM"], "(did you mean RUN?)"),
    ],
)
def test_what_is_no_command_is_told_the_line_to_type(words, line, capsys, tmp_path):
    run_folder = tmp_path / "a_run"
    run_folder.mkdir()
    (run_folder / "config.yaml").touch()
    put = [word.replace("RUN", str(run_folder)).replace("RUM", f"{tmp_path}/a_rum") for word in words]
    try:
        code = main(put)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert line.replace("RUN", str(run_folder)) in capsys.readouterr().err


def test_without_a_word_the_commands_of_a_first_day_are_shown(capsys):
    code, out, _ = run(capsys)
    commands = [line.partition("   ")[0].split() for line in out.splitlines()[:3]]
    assert code == 2
    for _, *words in commands:
        build_parser().parse_args(words)


def test_overrides_may_follow_options(capsys, tmp_path):
    code, _, err = run(
        capsys, "train", "tiny_ocr_lora", "--out", str(tmp_path), "rollout.n=1", "--resume", "actor.lr=1"
    )
    assert code == 2
    assert "rollout.n=1 actor.lr=1" in err


def test_warnings_are_one_line(tmp_path):
    command = [sys.executable, "-m", "flowcorr", "config", "tiny_ocr_lora", "sampling.true_cfg_scale=4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("flowcorr: warning: ")
    assert done.stderr.index("sampling.true_cfg_scale=4.0") < done.stderr.index("sampling.guidance_scale\n")
    assert done.stderr.count("\n") == 1


def test_a_closed_standard_error_leaves_results_as_they_are():
    script = f"{shlex.quote(sys.executable)} -m flowcorr config tiny_ocr_lora sampling.true_cfg_scale=4 2>&-"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert "warning" not in done.stdout
    assert done.stdout.startswith("model:\n")


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"flowcorr {__version__}\n"


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["config", "tiny_ocr_lora"]], ids=["none", "help", "config"]
)
def test_a_pipe_that_nobody_reads_ends_a_command_without_a_word(words):
    """Where Python buffers, the end of what is printed is written after the command."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "flowcorr", *words],
            stdout=pipe,
            stderr=subprocess.PIPE,
            env=environment,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_encoding_without_a_character_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "flowcorr", "explain", "ESS"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        check=False,
    )
    assert done.returncode == 1
    assert b"latin-1, which has no '\\u2265'; set PYTHONIOENCODING=utf-8:backslashreplace" in done.stderr
