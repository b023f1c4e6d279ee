import json

import numpy as np
import pytest
from PIL import Image

from flowcorr.errors import BackendError
from flowcorr.trackers import JsonlTracker, read_metrics


def log_steps(folder, steps, *, resume_step=None, offset=0.0):
    tracker = JsonlTracker()
    tracker.start("run", folder, resume_step=resume_step)
    for step in steps:
        tracker.log({"loss": step + offset}, step)
    tracker.finish()


def test_one_strict_record_a_step(tmp_path):
    tracker = JsonlTracker()
    tracker.start("run", tmp_path / "new" / "folder")
    tracker.log({"a/b": np.float32(0.5), "count": 3, "bad": float("nan"), "huge": float("-inf")}, 7)
    lines = (
        (tmp_path / "new" / "folder" / "metrics.jsonl").read_text().splitlines()
    )  # before finish: it is flushed
    tracker.finish()
    assert [json.loads(line) for line in lines] == [
        {"step": 7, "a/b": 0.5, "count": 3, "bad": None, "huge": None}
    ]


def test_resume_drops_later_records(tmp_path):
    log_steps(tmp_path, range(1, 6))
    log_steps(tmp_path, range(4, 7), resume_step=3, offset=0.5)
    losses = [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses == [1, 2, 3, 4.5, 5.5, 6.5]


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": 3', "\x00\x00\x00", '{"step": 3, "loss": 3.0}']
)
def test_resume_drops_a_torn_last_line(tmp_path, torn):
    log_steps(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write(torn)
    log_steps(tmp_path, [3, 4], resume_step=2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [{"step": step, "loss": step} for step in (1, 2, 3, 4)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_last_record_without_line_end_is_completed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}')
    log_steps(tmp_path, [2], resume_step=1)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_resume_without_a_file_starts_one(tmp_path):
    log_steps(tmp_path, [5], resume_step=4)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 5, "loss": 5.0}]


def test_new_run_replaces_the_file(tmp_path):
    log_steps(tmp_path, [1, 2, 3])
    log_steps(tmp_path, [1])
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_reader_skips_what_is_incomplete(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "a"')
    assert read_metrics(path) == [{"step": 1}]


def test_images_are_saved_as_png(tmp_path):
    tracker = JsonlTracker()
    tracker.start("run", tmp_path)
    picture = Image.new("RGB", (4, 3), (10, 20, 30))
    tracker.log_images({"eval/samples": [picture, picture]}, 12)
    tracker.finish()
    names = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert names == ["eval_samples_000012_00.png", "eval_samples_000012_01.png"]
    with Image.open(tmp_path / "images" / names[0]) as saved:
        assert (saved.size, saved.getpixel((0, 0))) == ((4, 3), (10, 20, 30))


def test_full_disk_is_reported(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = JsonlTracker()
    tracker.start("run", tmp_path)
    with pytest.raises(BackendError, match=r"metrics\.jsonl cannot be written \(No space left"):
        tracker.log({"loss": 1.0}, 1)
    with pytest.raises(BackendError, match="No space left"):
        tracker.finish()


def test_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="cannot be written"):
        JsonlTracker().start("run", tmp_path / "file")


def test_finish_without_start_does_nothing():
    JsonlTracker().finish()
