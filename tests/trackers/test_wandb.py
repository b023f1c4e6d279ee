import sys
from types import ModuleType

import pytest
from PIL import Image

from flowcorr.trackers import WandbTracker


def test_finish_without_start_does_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    WandbTracker().finish("finished")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # wandb's own
def test_offline_run_goes_on_under_its_id(tmp_path, monkeypatch, video):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for resume_step in (None, 1):
        tracker = WandbTracker()
        tracker.start("a run", tmp_path, resume_step=resume_step)
        tracker.log_config({"lr": 1e-4, "api_key": "do-not-write-me"})
        tracker.log({"actor/loss": 0.5}, 2)
        tracker.log_images({"samples": [Image.new("RGB", (4, 3))]}, 2)
        tracker.log_videos({"eval/videos": video}, 2)
        tracker.finish("finished")
        ids.append((tmp_path / "wandb_run_id.txt").read_text())
    assert ids[0] == ids[1]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [path.read_bytes() for path in files if path.suffix == ".gif"] == [video, video]
    assert not any(b"do-not-write-me" in path.read_bytes() for path in files)
