import os
import signal
from types import SimpleNamespace

import pytest
from PIL import Image

from flowcorr.errors import BackendError
from flowcorr.processes import CHILDREN_IGNORE, STOP_SIGNALS
from flowcorr.trackers import JsonlTracker, Trackers, read_metrics


class Noted:
    """Notes every call; raises `error` where a method is named in `fails`, and sets a handler in each call."""

    def __init__(self, fails=(), error=None):
        self.calls, self.fails, self.error = [], fails, error or RuntimeError("the service is gone")

    def __getattr__(self, name):
        def call(*arguments, **keywords):
            self.calls.append(name)
            signal.signal(signal.SIGINT, lambda *_: self.calls.append("took the signal"))
            if name in self.fails:
                raise self.error

        return call


@pytest.fixture
def started(tmp_path):
    """Started trackers of a run, with the messages about those that fail."""

    def start(**others):
        messages = []
        trackers = Trackers({"jsonl": JsonlTracker(), **others}, messages.append)
        trackers.start("run", tmp_path, {"lr": 1.0}, None)
        return trackers, messages

    return start


PICTURE = Image.new("RGB", (4, 3))


def use(trackers):
    for step in (1, 2):
        trackers.log_images({"eval/images": [PICTURE]}, step)
        trackers.log_videos({"eval/videos": b"GIF89a"}, step)
        trackers.log({"loss": 0.5}, step)
    trackers.finish("finished")


@pytest.mark.parametrize("method", ["log", "log_images", "log_videos", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("the service is gone"), KeyError("x"), SystemExit(3)])
def test_the_failure_of_one_costs_that_one_alone(started, tmp_path, method, error):
    broken, whole = Noted([method], error), Noted()
    trackers, messages = started(broken=broken, whole=whole)
    use(trackers)
    assert whole.calls == ["start", "log_config", *["log_images", "log_videos", "log"] * 2, "finish"]
    assert [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0.5, 0.5]
    (message,) = messages
    assert all(part in message for part in ("tracker broken", method, type(error).__name__))
    assert broken.calls.count(method) == 1
    assert broken.calls[-1] == "finish", "what it has is uploaded"


def test_without_the_folder_the_run_cannot_go_on_but_the_others_get_the_step(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    whole = Noted()
    trackers = Trackers({"jsonl": JsonlTracker(), "whole": whole}, pytest.fail)
    trackers.start("run", tmp_path, {}, None)
    for write in (lambda: trackers.log({"loss": 1.0}, 1), lambda: trackers.finish("failed")):
        with pytest.raises(BackendError, match=r"metrics\.jsonl .*No space left"):
            write()
    assert whole.calls == ["start", "log_config", "log", "finish"]


def test_one_that_cannot_start_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="gone"):
        Trackers({"x": Noted(["start"])}, pytest.fail).start("run", tmp_path, {}, None)


def test_signals_stay_the_runs(started):
    def handlers():
        return [signal.getsignal(number) for number in STOP_SIGNALS]

    before, tracker = handlers(), Noted()
    trackers, _ = started(tracker=tracker)
    assert handlers() == before
    use(trackers)
    assert handlers() == before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert "took the signal" not in tracker.calls


def test_their_processes_get_no_ctrl_c(tmp_path):
    masks = []
    tracker = SimpleNamespace(
        start=lambda *_, **__: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        log_config=lambda _: None,
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    Trackers({"x": tracker}, pytest.fail).start("run", tmp_path, {}, None)
    assert set(CHILDREN_IGNORE) <= masks[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_on_other_ranks_there_are_none(tmp_path):
    trackers = Trackers({}, pytest.fail)
    trackers.start("run", tmp_path, {}, None)
    use(trackers)
    assert trackers.beside_folder == []
    assert list(tmp_path.iterdir()) == []
