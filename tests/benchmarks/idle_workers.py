"""How long the Ray workers of two ranks are idle.

    python -m tests.benchmarks.idle_workers

A task sleeps instead of sampling, so that the cores of this machine do not matter: about `--seconds`, log-normal with a
sigma of 0.3. Each step, the ranks submit their shares of five tasks, and go on when both have their answers.
"""

from __future__ import annotations

import argparse
import random
import time
from functools import partial

from flowcorr import distributed
from flowcorr.workers.dispatcher import WorkerOptions
from flowcorr.workers.pool import WorkerPool, ignore_event
from tests.ranks import Ranks
from tests.ray_tasks import Tasks

TASKS, RANKS = 5, 2


def steps(workers: int, number: int, seconds: float) -> tuple[float, float]:
    """Seconds that this rank's tasks took, and seconds of all steps."""
    options = WorkerOptions(
        section="rollout", num_workers=workers, resources={"num_cpus": 0.1}, timeout=600.0
    )
    pool = WorkerPool(Tasks, options, address=None, on_event=ignore_event)
    draw = random.Random(0)
    mine = distributed.local_indices(TASKS)
    pool.submit("a first task", "pid", 0.0).result()
    distributed.gather(None, "the start")
    busy, begin = 0.0, time.monotonic()
    for _ in range(number):
        pauses = [seconds * draw.lognormvariate(0, 0.3) for _ in range(TASKS)]
        for future in [pool.submit("a pause", "pid", pauses[task]) for task in mine]:
            future.result()
        busy += sum(pauses[task] for task in mine)
        distributed.gather(None, "a step")
    span = time.monotonic() - begin
    pool.close()
    return busy, span


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    ranks = Ranks(RANKS)
    for workers in (1, 2, 3, 4):
        told = ranks.call(partial(steps, workers, options.steps, options.seconds))
        busy, span = sum(part for part, _ in told), told[0][1]
        print(
            f"{workers} workers: idle {100 * (1 - busy / workers / span):.0f} %, {span / options.steps:.2f} s"
        )
    ranks.close()


if __name__ == "__main__":
    main()
