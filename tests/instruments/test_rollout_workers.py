"""Where rollout workers ran, and their gaps, as a run's files tell them."""

import json

from flowcorr.instruments.rollout_workers import places_of, worker_table


def test_places_are_read_from_the_events(tmp_path):
    assert places_of(tmp_path) == {}
    first = {"node": "x", "host": "a", "pid": 5, "gpus": [0]}
    events = [
        {"kind": "workers", "places": [first, {"host": "a", "pid": 6, "gpus": []}, "odd"]},
        {"kind": "worker_restarted", "worker": "rollout worker 1", "host": "b", "pid": 9, "gpus": [2, 3]},
        {"kind": "worker_restarted", "worker": "reward worker 0", "host": "c", "pid": 1},
        {"kind": "worker_restarted", "worker": "rollout worker x"},
        {"kind": "worker_restarted", "worker": None},
        {"kind": "workers", "places": 3},
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert places_of(tmp_path) == {0: "host a, process 5, GPU 0", 1: "host b, process 9, GPU 2, 3", 2: ""}


def test_a_row_for_each_worker():
    records = [
        {"step": 0},
        {"rollout_corr/worker_1/logprob_abs_diff": 1e-4, "rollout_corr/worker_1/relative_gap": 2.0},
        {"rollout_corr/worker_1/logprob_abs_diff": 3e-4, "rollout_corr/worker_0/relative_gap": None},
        {"rollout_corr/worker_0/relative_gap": 0.5},
    ]
    table = worker_table("a", records, {0: "host a"})
    rows = [tuple(table.cells(row)) for row in table.rows]
    assert rows == [("0", "host a", "-", "0.5"), ("1", "not known", "0.0002", "2")]
