"""Training steps of two checkouts, or of two settings, side by side.

    git worktree add --detach /tmp/before 5659ae6
    python tests/benchmarks/step_beside.py "/tmp/before" "."
    python tests/benchmarks/step_beside.py ". reward.placement=local" ". rollout.batch_size=48"

Each argument is a checkout and configuration keys of the default recipe. All run in turn, `--repeats` times; a ratio is
the median of those within each turn, with the lowest and the highest.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from flowcorr.trackers.jsonl import read_metrics

SHORT = ("trainer.eval_every=0", "trainer.image_every=0", "data.num_heldout=4")
PHASES = ("step", "rollout", "old_log_prob", "reward", "update")


def seconds(contender: str, steps: int) -> dict[str, float]:
    """Median seconds of each phase over the steps of a run, but for the first."""
    checkout, *overrides = contender.split()
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [
                *(sys.executable, "-m", "flowcorr", "train", "tiny_ocr_lora", "--out", f"{folder}/run"),
                *(*SHORT, f"trainer.total_steps={steps}", *overrides),
            ],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(Path(checkout).resolve())},
            check=False,
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise SystemExit(f"{contender}: {run.stderr.strip()}")
        records = [
            record for record in read_metrics(Path(folder) / "run/metrics.jsonl") if record["step"] > 1
        ]
    return {phase: statistics.median(record[f"timing/{phase}"] for record in records) for phase in PHASES}


def main(contenders: Sequence[str], steps: int, repeats: int) -> None:
    seen = defaultdict(list)
    for repeat in range(repeats):
        turn = repeat % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            seen[contender].append(seconds(contender, steps))
    print(f"| | {' s | '.join(PHASES)} s | step, of the first |\n|{'---|' * (len(PHASES) + 2)}")
    for contender in contenders:
        medians = (statistics.median(run[phase] for run in seen[contender]) for phase in PHASES)
        ratios = sorted(
            run["step"] / first["step"]
            for run, first in zip(seen[contender], seen[contenders[0]], strict=True)
        )
        cells = " | ".join(f"{median:.2f}" for median in medians)
        print(
            f"| {contender} | {cells} | {statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f}) |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("contenders", nargs="+", metavar="'CHECKOUT key=value ...'")
    arguments = parser.parse_args()
    main(arguments.contenders, arguments.steps, arguments.repeats)
