"""The event log: whole lines, whatever happens to the run."""

import json
import threading
from pathlib import Path

import pytest

from flowcorr.trainer.events import EventLog, read_events


def write(folder, *kinds, step=0):
    with EventLog(folder) as log:
        log.step = step
        for kind in kinds:
            log(kind, note="ü\n")


def kinds(folder):
    return [event["kind"] for event in read_events(folder / "events.jsonl")]


def test_a_record_is_a_line_that_is_there_at_once(tmp_path):
    with EventLog(tmp_path) as log:
        log("start", total_steps=3)
        log.step = 2
        log("worker_lost", worker="rollout worker 0", path=tmp_path)
        first, second = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert list(first) == ["time", "step", "kind", "total_steps"]
    assert (second["step"], second["kind"], second["path"]) == (2, "worker_lost", str(tmp_path))
    assert first["time"] <= second["time"]
    assert first["time"].endswith("+00:00")


def test_records_of_all_runs_stay(tmp_path):
    write(tmp_path, "start", "checkpoint", step=4)
    write(tmp_path, "resume", "end", step=2)
    assert kinds(tmp_path) == ["start", "checkpoint", "resume", "end"]


@pytest.mark.parametrize("torn", ['{"time": "2026', '{"kind": "end"', "\x00\x00"])
def test_a_torn_last_line_goes(tmp_path, torn):
    write(tmp_path, "start")
    path = tmp_path / "events.jsonl"
    with path.open("a") as file:
        file.write(torn)
    assert kinds(tmp_path) == ["start"]
    write(tmp_path, "resume")
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["start", "resume"]


def test_a_record_of_another_rank_stays_while_the_log_is_opened(tmp_path, monkeypatch):
    with EventLog(tmp_path) as other:
        other("start")
        read = Path.read_bytes

        def read_before_it_writes(path):
            found = read(path)
            other("frames")
            return found

        monkeypatch.setattr(Path, "read_bytes", read_before_it_writes)
        with EventLog(tmp_path):
            pass
    assert kinds(tmp_path) == ["start", "frames"]


def test_threads_do_not_mix_their_records(tmp_path):
    with EventLog(tmp_path) as log:
        threads = [
            threading.Thread(target=lambda name: [log(name, text="x" * 500) for _ in range(50)], args=(name,))
            for name in "abcd"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(kinds(tmp_path)) == sorted("abcd" * 50)


def test_a_disk_that_is_full_for_a_while_costs_what_it_cannot_hold(tmp_path, caplog, monkeypatch):
    """A write may also be cut short; the next record then begins a line of its own."""
    import os

    from flowcorr.trainer import events

    write_all = os.write
    with EventLog(tmp_path) as log:
        monkeypatch.setattr(events.os, "write", lambda file, line: write_all(file, line[:20]))
        log("shard_retried")
        monkeypatch.setattr(events.os, "write", refuse)
        log("worker_lost")
        monkeypatch.setattr(events.os, "write", write_all)
        log("end")
    assert kinds(tmp_path) == ["end"]
    assert f"{tmp_path / 'events.jsonl'} cannot" in caplog.text
    assert "No space" in caplog.text


def refuse(file, line):
    raise OSError(28, "No space left on device")


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path, caplog):
    write(tmp_path / "nowhere", "start")
    assert str(tmp_path / "nowhere") in caplog.text


def test_after_the_end_nothing_is_written(tmp_path):
    with EventLog(tmp_path) as log:
        log("end")
    log("worker_lost")
    assert kinds(tmp_path) == ["end"]
