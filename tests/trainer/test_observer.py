"""The observer of a run."""

import inspect
import re
from pathlib import Path

from flowcorr import trainer
from flowcorr.instruments.progress import TerminalObserver
from flowcorr.trainer import Silent
from flowcorr.trainer.observer import Observer
from tests.trainer.runs import records, small_config

CALLS = {name for name in vars(Observer) if name.startswith("on_")}


def test_observers_take_all_calls_of_a_run():
    for name in CALLS:
        expected = inspect.signature(getattr(Observer, name)).parameters.keys()
        for observer in (Silent, TerminalObserver):
            assert inspect.signature(getattr(observer, name)).parameters.keys() == expected, name


class Notes:
    """An observer that has nothing but the calls of the protocol, and notes them."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        assert name in CALLS, f"{name} is no call of Observer"
        return lambda *arguments: self.calls.append((name, *arguments))


def test_a_run_tells_each_of_its_stages_once(tmp_path):
    notes = Notes()
    settings = small_config("trainer.total_steps=1", "trainer.eval_every=1")
    result = trainer.train(settings, tmp_path, observer=notes)
    assert [(name, arguments[0]) for name, *arguments in notes.calls] == [
        ("on_start", settings),
        ("on_phase", "evaluation"),
        ("on_eval", 0),
        *(
            ("on_phase", phase)
            for phase in ("rollout", "old_log_prob", "reward", "replay", "correction", "update", "sync")
        ),
        ("on_step", 1),
        ("on_phase", "evaluation"),
        ("on_eval", 1),
        ("on_finish", result),
    ]
    assert notes.calls[0][1:] == (settings, tmp_path, 0)
    logged = {record["step"]: record for record in records(tmp_path)}
    metrics = {name: arguments[1] for name, *arguments in notes.calls if name in ("on_step", "on_eval")}
    assert metrics["on_step"]["reward/mean"] == logged[1]["reward/mean"]
    assert metrics["on_eval"]["eval/reward"] == logged[1]["eval/reward"] == result.metrics["eval/reward"]


def test_the_observer_of_the_page_follows_a_run(tmp_path, capsys):
    page = (Path(trainer.__file__).parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    definitions, call, _ = code.partition("\ntrain(")
    assert call
    names = {}
    exec(compile(definitions, "README.md", "exec"), names)
    observer = names["Gaps"]()
    gaps = []
    observer.on_step = lambda step, metrics: (
        names["Gaps"].on_step(observer, step, metrics),
        gaps.append(observer.largest),
    )
    trainer.train(small_config("trainer.total_steps=1", "trainer.eval_every=1"), tmp_path, observer=observer)
    assert gaps == [records(tmp_path)[-1]["rollout_corr/logprob_abs_diff_max"]]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["0:", "1:"]
