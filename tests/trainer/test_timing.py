"""The split of a step."""

import pytest
import torch

from flowcorr.metrics import Metrics
from flowcorr.trainer.timing import PHASES, Stopwatch


def test_the_peak_is_that_of_one_step(monkeypatch):
    peak = 9e9
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak)

    def reset(_):
        nonlocal peak
        peak = 1e9

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    values = Metrics(Stopwatch(lambda _: None, torch.device("cuda")).metrics(num_images=1)).compute()
    assert values["perf/max_memory_gb"] == 1


def test_each_phase_is_told_and_timed():
    told = []
    watch = Stopwatch(told.append, torch.device("cpu"))
    for phase in ("rollout", "update", "rollout"):
        with watch(phase):
            sum(range(1000))
    values = Metrics(watch.metrics(num_images=8)).compute()
    assert told == ["rollout", "update", "rollout"]
    assert set(values) == {f"timing/{phase}" for phase in PHASES} | {"timing/step", "perf/images_per_second"}
    assert values["timing/rollout"] > 0
    assert values["timing/old_log_prob"] == 0
    assert sum(values[f"timing/{phase}"] for phase in PHASES) <= values["timing/step"]
    assert values["perf/images_per_second"] == pytest.approx(8 / values["timing/step"])
