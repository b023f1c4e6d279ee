"""The observer of a run."""

import inspect

from flowcorr.cli.progress import TerminalObserver
from flowcorr.trainer import Silent
from flowcorr.trainer.observer import Observer


def test_observers_take_all_calls_of_a_run():
    calls = {name for name in vars(Observer) if name.startswith("on_")}
    assert calls
    for name in calls:
        expected = inspect.signature(getattr(Observer, name))
        assert inspect.signature(getattr(Silent, name)) == expected
        assert (
            inspect.signature(getattr(TerminalObserver, name)).parameters.keys() == expected.parameters.keys()
        )


def test_an_observer_may_be_silent(tmp_path):
    observer = Silent()
    observer.on_start(None, tmp_path, 0)
    observer.on_step(1, {"reward/mean": 1.0})
    observer.on_message("resumed")
