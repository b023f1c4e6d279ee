"""The object in a worker's own process."""

import os
import sys

import pytest
import torch

from flowcorr.workers.process import FlowcorrWorker

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("ray_cluster")]


class Counter:
    closed = False

    def __init__(self):
        self.count = 0

    def add(self, number):
        self.count += number
        return self.count

    def close(self):
        Counter.closed = True


def test_it_makes_calls_and_closes_the_object(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    worker = FlowcorrWorker([str(tmp_path), sys.path[0]])
    assert sys.path.count(str(tmp_path)) == sys.path.count(sys.path[0]) == 1
    started = worker.start(Counter, torch.get_num_threads())
    assert started["pid"] == os.getpid()
    assert len(started["node"]) == 56
    assert [worker.call("add", [2], 1), worker.call("add", [3], 1)] == [(None, 2), (None, 5)]
    worker.close()
    assert Counter.closed


@pytest.mark.parametrize("start", [True, False])
def test_without_an_object_that_can_be_closed_nothing_is_closed(start):
    worker = FlowcorrWorker([])
    if start:
        worker.start(dict, None)
    worker.close()


class Unclosable:
    def close(self):
        self.file.close()


def test_an_error_of_close_is_not_hidden():
    worker = FlowcorrWorker([])
    worker.start(Unclosable, None)
    with pytest.raises(AttributeError, match="file"):
        worker.close()
