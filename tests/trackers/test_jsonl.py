import json
import os
import re

import numpy as np
import pytest

from flowcorr.errors import BackendError, ConfigError
from flowcorr.trackers import JsonlTracker, read_metrics
from flowcorr.trackers.jsonl import MAX_BYTES


def log_steps(folder, steps, *, resume_step=None, offset=0.0):
    tracker = JsonlTracker()
    tracker.start("run", folder, resume_step=resume_step)
    for step in steps:
        tracker.log({"loss": step + offset}, step)
    tracker.finish("finished")


def test_one_strict_record_a_step(tmp_path):
    tracker = JsonlTracker()
    tracker.start("run", tmp_path / "new" / "folder")
    tracker.log({"a/b": np.float32(0.5), "count": 3, "bad": float("nan"), "huge": float("-inf")}, 7)
    lines = (
        (tmp_path / "new" / "folder" / "metrics.jsonl").read_text().splitlines()
    )  # before finish: it is flushed
    tracker.finish("finished")
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


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"step": 2, "loss": "high"}', "loss='high' "),
        (b'{"step": 2, "loss": true}', "loss=True "),
        (b'{"step": 2, "loss": [1, 2]}', "loss=[1, 2] "),
        (b'{"step": 2, "loss": 1e305}', "loss=1e+305 must be a number up to 1e+300"),
        (b'{"step": 2, "loss": 1' + b"0" * 400 + b"}", "number up to 1e+300"),
        (b'{"step": 2, "loss": 1' + b"0" * 5000 + b"}", "5001 digits"),
        (b'{"step": 1, "loss": 2}', "step 1 has loss already"),
        (b'{"step": 2, "a\\u001b[31m": 2}', r"'a\x1b[31m' "),
        (b'{"step": 2, "\\ud800": 2}', r"'\ud800' "),
    ],
)
def test_a_value_that_is_no_metric_is_left_out(line, says, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n' + line + b'\n{"step": 3, "loss": 3.0}\n')
    with pytest.warns(UserWarning, match=f"out 1 .* line 2: .*{re.escape(says)}"):
        records = read_metrics(path)
    assert [record["loss"] for record in records if "loss" in record] == [1.0, 3.0]


@pytest.mark.parametrize(
    "line",
    [
        b"step,loss",
        b"[1, 2]",
        b'{"loss": 2.0}',
        b'{"step": true, "loss": 2.0}',
        b'{"step": -1, "loss": 2.0}',
        b'{"step": 2.0, "loss": 2.0}',
        b'{"step": 1' + b"0" * 30 + b', "loss": 2.0}',
        b'{"step": 2, "loss": 2.0, "loss": 3.0}',
        b'{"step": 2, "l\xffss": 2.0}',
        b'{"a": ' * 10**5,
        b"\x00\x00",
        b'{"step": 2, "lo',
    ],
)
def test_a_line_that_is_no_record_is_left_out(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n' + line + b'\n{"step": 3, "loss": 3.0}\n')
    with pytest.warns(UserWarning, match="out 1 .* line 2: ") as caught:
        records = read_metrics(path)
    assert len(str(caught[0].message)) < 500
    assert records == [{"step": 1, "loss": 1.0}, {"step": 3, "loss": 3.0}]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": NaN, "b": -Infinity, "c": 1e400, "d": null}\n')
    assert read_metrics(path) == [{"step": 1, "a": None, "b": None, "c": None, "d": None}]


def test_records_come_in_the_order_of_their_steps(tmp_path):
    log_steps(tmp_path, [2, 1, 3])
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_file_that_is_none_or_too_large_is_refused(tmp_path):
    pipe, large = (tmp_path / name for name in ("pipe", "large"))
    os.mkfifo(pipe)
    large.touch()
    os.truncate(large, MAX_BYTES + 1)
    for path in (pipe, tmp_path, tmp_path / "nowhere", large):
        with pytest.raises(ConfigError, match=f"^{path} .* {MAX_BYTES} bytes$"):
            read_metrics(path)


def test_full_disk_is_reported(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = JsonlTracker()
    tracker.start("run", tmp_path)
    for write in (lambda: tracker.log({"loss": 1.0}, 1), lambda: tracker.finish("finished")):
        with pytest.raises(BackendError, match=r"metrics\.jsonl .*No space left"):
            write()


def test_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match=r"file/metrics\.jsonl .*File exists"):
        JsonlTracker().start("run", tmp_path / "file")


def test_finish_without_start_does_nothing():
    JsonlTracker().finish("finished")
