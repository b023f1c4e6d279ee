"""Warnings and stops of healthy training steps, drawn from those of clean runs: there should be none.

    python tests/benchmarks/false_alarms.py --seeds 9003 --steps 40 --out runs/clean
    python -m tests.benchmarks.drawn_steps runs/clean --steps 100000 --seed 5

A drawn step is a step of a clean run, whose values are varied, each by itself: by a lognormal factor with half of the
spread of the logarithms of its metric, a fifth at most. So values reach to twice those of any run and to combinations
that none had, while sizes remain those of a model, a precision, a mode and a step of the schedule. The steps of a kept
run make runs of 1,000 steps. All health rules, and those that stop a run, judge them as in training. Prints how often
each spoke, by kept run; sizes of an announced gap are in parentheses.
"""

import argparse
import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import stdev

from flowcorr import config
from flowcorr.errors import RolloutFault
from flowcorr.health.gate import Gate
from flowcorr.health.rules import HealthMonitor, is_step, units_of
from flowcorr.health.table import rows_of
from flowcorr.metrics import Metrics, maximum
from flowcorr.trackers.jsonl import read_metrics
from tests.benchmarks.false_alarms import SIZES

RUN = 1000  # steps
LARGEST = 0.2  # std of a factor's logarithm


def spreads(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By metric, the std of the factor's logarithm."""
    logs = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if value and math.isfinite(value):
                logs[name].append(math.log(abs(value)))
    return {name: min(LARGEST, stdev(values) / 2) for name, values in logs.items() if len(values) > 1}


def judge(folder: Path, steps: int, draw: random.Random) -> Counter[str]:
    """How often warnings and stops spoke in steps that are drawn from a kept run."""
    run_config, told = config.load(folder / "config.yaml"), Counter[str]()
    records = list(filter(is_step, read_metrics(folder / "metrics.jsonl")))
    varied = spreads(records)
    for step in range(1, steps + 1):
        if step % RUN == 1:
            monitor, gate = (
                HealthMonitor(units_of(run_config, records[0])),
                Gate(run_config, rows_of(run_config)),
            )
        values = {
            name: value * draw.lognormvariate(0.0, varied.get(name, 0.0))
            for name, value in draw.choice(records).items()
            if value is not None
        }
        for finding in monitor.update(values):
            if finding.level in {"warning", "serious"}:
                told[f"({finding.cause})" if finding.cause in SIZES else finding.cause] += 1
        try:
            gate.check(
                step,
                Metrics({name: maximum(value) for name, value in values.items()}),
                lambda: None,
            )
        except RolloutFault as fault:
            told.update(f"STOP {finding.cause}" for finding in fault.findings)
    return told


def main(folder: Path, steps: int, seed: int) -> None:
    runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    told = Counter[str]()
    for number, run in enumerate(runs):
        own = judge(run, steps // len(runs), random.Random(seed * 1000 + number))
        told.update(own)
        print(
            f"{run.name} | {', '.join(f'{cause} {count}' for cause, count in own.items()) or 'nothing'}",
            flush=True,
        )
    stops = sum(count for cause, count in told.items() if cause.startswith("STOP"))
    warnings = sum(count for cause, count in told.items() if not cause.startswith(("STOP", "(")))
    print(f"{steps // len(runs)} steps of each of {len(runs)} runs: {warnings} warnings, {stops} stops")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="runs that false_alarms.py kept with --out")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=5)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    main(arguments.folder, arguments.steps, arguments.seed)
