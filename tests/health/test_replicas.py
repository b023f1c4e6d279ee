"""Workers with a fault of their own among healthy ones."""

import random

import pytest

from flowcorr.health.replicas import ReplicaMonitor
from flowcorr.health.rule import Units
from flowcorr.health.rules import HealthMonitor, examine_run

WORKERS = 4


def number(odd):
    """Of the worker that a finding names."""
    return odd.finding.numbers["worker"]


def step_of(seed, factors=(), *, spread=0.1, workers=WORKERS):
    """A training step in which each worker's gap varies by a tenth; `factors` are those of the first workers."""
    draw = random.Random(seed)
    gaps = [draw.lognormvariate(0.0, spread) for _ in range(workers)]
    gaps = [gap * factor for gap, factor in zip(gaps, [*factors, *[1.0] * workers], strict=False)]
    return {f"rollout_corr/worker_{worker}/relative_gap": gap for worker, gap in enumerate(gaps)}


def found(steps):
    monitor = ReplicaMonitor()
    return [[number(odd) for odd in monitor.update(step)] for step in steps]


@pytest.mark.parametrize("workers", [2, 3, 4, 16])
@pytest.mark.parametrize("spread", [0.1, 0.3])  # of about 50 and 6 terms a worker
def test_workers_that_differ_by_chance_are_not_named(workers, spread):
    for seed in range(20):
        steps = [step_of(1000 * seed + step, workers=workers, spread=spread) for step in range(30)]
        assert found(steps) == [[]] * 30


@pytest.mark.parametrize("workers", [2, 3, 4, 16])
@pytest.mark.parametrize("begin", [0, 10])
def test_a_faulty_worker_is_named_and_no_other(workers, begin):
    factors = [1.0, 3.0]
    steps = [step_of(step, factors if step >= begin else (), workers=workers) for step in range(begin + 8)]
    named = found(steps)
    assert named[:begin] == [[]] * begin
    assert named[-1] == [1]


def test_a_worker_that_is_better_than_the_others_has_no_fault():
    assert found([step_of(step, [0.2]) for step in range(10)]) == [[]] * 10


def test_workers_whose_kernels_differ_a_little_are_not_named():
    assert found([step_of(step, [1.15], spread=0.005) for step in range(10)]) == [[]] * 10


def test_gaps_of_zero_are_no_fault():
    steps = [{f"rollout_corr/worker_{worker}/relative_gap": 0.0 for worker in range(3)}] * 6
    assert found(steps) == [[]] * 6


def test_the_finding_comes_once_and_says_where_the_worker_runs():
    monitor = HealthMonitor(Units(), places={1: "host a, process 7, GPU 3"})
    steps = [step_of(step, [1.0, 4.0]) for step in range(12)]
    findings = [finding for step in steps for finding in monitor.update(step)]
    (finding,) = findings
    assert finding.cause == "worker"
    assert finding.numbers["metric"] == "rollout_corr/worker_1/relative_gap"
    assert (finding.numbers["worker"], finding.numbers["place"]) == (1, "host a, process 7, GPU 3")
    records = [step | {"step": number} for number, step in enumerate(steps, 1)]
    (of_run,) = examine_run(records, Units())
    assert (of_run.cause, of_run.numbers["step"], of_run.numbers["worker"]) == ("worker", 12, 1)
    assert (of_run.numbers["steps_broken"], "place" in of_run.numbers) == (9, False)
    assert "place" not in of_run.numbers
