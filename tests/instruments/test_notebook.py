"""`flowcorr.train` as programs and notebooks call it."""

import builtins
import html
import re

import flowcorr
from tests.conftest import small_config

ONE_STEP = {"total_steps": 1, "eval_every": 1, "eval_num_inference_steps": 2}
FEW_PROMPTS = {"num_train": 4, "num_heldout": 2}


class ZMQInteractiveShell:
    """The shell of a notebook's kernel, by the name that tells it."""


def train(folder, **options):
    return flowcorr.train(small_config(trainer=ONE_STEP, data=FEW_PROMPTS), folder / "a_run", **options)


def test_a_notebook_shows_progress_and_the_first_screen_of_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    result = train(tmp_path)
    printed = capsys.readouterr().out
    assert re.search(r"^step 1/1  reward ", printed, re.M)
    assert "\x1b" not in printed
    (page,) = re.findall(r'srcdoc="([^"]*)"', result._repr_html_())
    page = html.unescape(page)
    assert f"<h1>{result.out_dir.name}</h1>" in page
    assert 'class="finding verdict' in page
    assert "eval/reward" in page
    assert "<svg" not in page


def test_another_program_prints_what_it_likes(tmp_path, capsys):
    class Steps(flowcorr.trainer.Silent):
        def on_step(self, step, metrics):
            print(f"{step} is done")

    result = train(tmp_path)
    assert capsys.readouterr().out == ""
    assert (result.status, result.step) == ("finished", 1)
    two_steps = small_config(trainer={**ONE_STEP, "total_steps": 2}, data=FEW_PROMPTS)
    flowcorr.train(two_steps, result.out_dir, resume=True, observer=Steps())
    assert capsys.readouterr().out == "2 is done\n"
