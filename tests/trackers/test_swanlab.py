import os
import signal
import sys
from types import ModuleType

import pytest
from PIL import Image

from flowcorr.errors import BackendError
from flowcorr.trackers import SwanLabTracker, Trackers


def test_finish_without_start_does_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", ModuleType("swanlab"))
    SwanLabTracker().finish("finished")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # swanlab's own
def test_offline_run_goes_on_under_its_id(tmp_path, monkeypatch, video):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    ids = []
    for resume_step in (None, 1):
        tracker = SwanLabTracker()
        tracker.start("a run", tmp_path, resume_step=resume_step)
        tracker.log_config({"lr": 1e-4, "api_key": "do-not-write-me"})
        tracker.log({"actor/loss": 0.5}, 2)
        tracker.log_images({"samples": [Image.new("RGB", (4, 3))]}, 2)
        tracker.log_videos({"eval/videos": video}, 2)
        tracker.finish("finished")
        ids.append((tmp_path / "swanlab_run_id.txt").read_text())
    assert ids[0] == ids[1]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".swanlab" for path in files) == 2
    assert sum(path.suffix == ".png" for path in files) == 2
    assert [path.read_bytes() for path in files if path.suffix == ".gif"] == [video, video]
    assert not any(b"do-not-write-me" in path.read_bytes() for path in files)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_ctrl_c_is_the_runs(tmp_path, monkeypatch):
    """SwanLab's own handler would end its run before the step is logged."""
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append("run"))
    try:
        trackers = Trackers({"swanlab": SwanLabTracker()}, pytest.fail)
        trackers.start("a run", tmp_path, {"lr": 1e-4}, None)
        os.kill(os.getpid(), signal.SIGINT)
        trackers.log({"actor/loss": 0.5}, 1)
        trackers.finish("interrupted")
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == ["run"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_without_a_login_the_remedy_is_named(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "online")
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path))
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    monkeypatch.setenv("SWANLAB_INTERACTIVE", "false")  # else it asks for a key
    with pytest.raises(BackendError, match=r"SWANLAB_MODE=offline"):
        SwanLabTracker().start("a run", tmp_path)
