"""CPU seconds of a training step by how many images of a prompt are sampled, and learned from.

    python -m tests.benchmarks.chosen_samples [--repeats 5] [RECIPE [OVERRIDE ...]]

Learns from the recipe's `rollout.n` images of as many, of twice as many, and from all of those. The three take turns;
of each its fastest step counts, which other work on the machine disturbed least. A reward in a thread is counted in the
phases beside it.
"""

import argparse
import time
from collections import defaultdict

from flowcorr.config import load
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.setup import build_run
from flowcorr.trainer.step import train_step


def cpu_seconds(run: TrainingRun, step: int) -> dict[str, float]:
    """CPU seconds of a training step, by phase."""
    begins: list[tuple[str, float]] = [("before", time.process_time())]
    train_step(run, step, lambda phase: begins.append((phase, time.process_time())))
    ends = [*(begin for _, begin in begins[1:]), time.process_time()]
    seconds: dict[str, float] = defaultdict(float)
    for (phase, begin), end in zip(begins, ends, strict=True):
        seconds[phase] += end - begin
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("recipe", nargs="?", default="tiny_ocr_lora")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    few = load(arguments.recipe, arguments.overrides).rollout.n
    many = f"rollout.n={2 * few}"
    runs = []
    for more in ([], [many, f"rollout.n_learned={few}"], [many]):
        run, _ = build_run(load(arguments.recipe, [*arguments.overrides, "rollout.replay_every=0", *more]))
        run.engine.sync(run.actor.weights.snapshot())
        runs.append((" ".join(more) or "the recipe", run))
    steps: dict[str, list[dict[str, float]]] = defaultdict(list)
    for step in range(1, arguments.repeats + 2):
        for name, run in runs:
            steps[name].append(cpu_seconds(run, step))
    for name, taken in steps.items():
        fastest = min(taken[1:], key=lambda phases: sum(phases.values()))
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in fastest.items() if seconds >= 0.005)
        print(f"{name}: {sum(fastest.values()):.2f} s of CPU ({parts})")
    for _, run in runs:
        run.close()


if __name__ == "__main__":
    main()
