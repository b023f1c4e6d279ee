import errno
import io
import os

import pytest
from PIL import Image

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from flowcorr.errors import BackendError
from flowcorr.trackers import TensorBoardTracker


def read(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def log_steps(folder, steps, *, resume_step=None, offset=0.0):
    tracker = TensorBoardTracker()
    tracker.start("run", folder, resume_step=resume_step)
    for step in steps:
        tracker.log({"actor/loss": step + offset, "actor/bad": float("nan")}, step)
    tracker.finish("finished")


def losses(folder):
    return [(event.step, event.value) for event in read(folder).Scalars("actor/loss")]


def test_scalars_can_be_read_back(tmp_path):
    log_steps(tmp_path, [1, 2])
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0)]
    assert read(tmp_path).Tags()["scalars"] == ["actor/loss"]


def test_resume_overrides_later_steps(tmp_path):
    log_steps(tmp_path, [1, 2, 3])
    log_steps(tmp_path, [3, 4], resume_step=2, offset=0.5)
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]


def test_new_run_replaces_the_events(tmp_path):
    log_steps(tmp_path, [1, 2, 3])
    log_steps(tmp_path, [1], offset=0.5)
    assert losses(tmp_path) == [(1, 1.5)]


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    def fail(self):
        close(self)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    close = SummaryWriter.close
    monkeypatch.setattr(SummaryWriter, "flush", fail)
    monkeypatch.setattr(SummaryWriter, "close", fail)
    tracker = TensorBoardTracker()
    tracker.start("run", tmp_path)
    for write in (lambda: tracker.log({"actor/loss": 1.0}, 1), lambda: tracker.finish("finished")):
        with pytest.raises(BackendError, match=f"^{tmp_path}/tensorboard .*No space left"):
            write()
    tracker.finish("finished")


def test_images_and_config_without_secrets(tmp_path):
    tracker = TensorBoardTracker()
    tracker.start("run", tmp_path)
    tracker.log_config({"actor": {"lr": 1e-4}, "reward": {"api_key": "do-not-write-me"}})
    tracker.log_images({"samples": [Image.new("RGB", (4, 3)), Image.new("L", (4, 3))]}, 5)
    tracker.finish("finished")
    events = read(tmp_path)
    assert events.Tags()["images"] == ["samples/0", "samples/1"]
    assert (events.Images("samples/1")[0].width, events.Images("samples/1")[0].height) == (4, 3)
    written = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b'"lr": 0.0001' in written
    assert b"do-not-write-me" not in written


def test_a_video_is_an_animated_image(tmp_path, video):
    tracker = TensorBoardTracker()
    tracker.start("run", tmp_path)
    tracker.log_videos({"eval/videos": video}, 5)
    tracker.finish("finished")
    (event,) = read(tmp_path).Images("eval/videos")
    assert (event.step, event.width, event.height) == (5, 8, 6)
    with Image.open(io.BytesIO(event.encoded_image_string)) as film:
        assert film.n_frames == 3


def test_finish_without_start_does_nothing():
    TensorBoardTracker().finish("finished")
