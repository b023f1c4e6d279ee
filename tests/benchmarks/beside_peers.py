"""Training loops of flow_grpo, Flow-Factory and verl-omni, as they are, beside `flowcorr train`, on equal work.

    tests/integrations/real_loops/install.sh VENV
    tests/integrations/install.sh VENV PATH      # PATH: verl-omni's source tree
    FLOW_GRPO=PATH FLOW_FACTORY=PATH VERL_OMNI=PATH VENV/bin/python tests/benchmarks/beside_peers.py [--quick]

The embedded architecture, untrained, in float32 on a CPU: ten steps, guidance 4.5, LoRA rank 32, JPEG size as the
reward, the rollout's log-probs as the old ones, 32 images and two updates an epoch. The others work in batches of 8,
and so does `flowcorr` here; `defaults` leaves batches to flowcorr, and `compiled` adds `actor.compile=true`. `longer`
and `longest` take longer steps after a window of two: 6 and 3 calls of the transformer instead of 10. All loops of a
setting are loaded at once and take turns, epoch by epoch, after one epoch each that warms up. Of each loop its fastest
epoch counts, which other work on the machine disturbed least.

verl-omni samples by its own pipeline and server, but not in vllm-omni's engine, which needs a GPU: there it is faster.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent), str(TESTS.parent / "examples/tiny_ocr")]

from tests.benchmarks.peer_loops import FLOWCORR, LONGER, PEERS, STEPS, Setting, encoded  # noqa: E402

LONG, SHORT = (77, 128), (8, 8)
SETTINGS = [
    Setting(pixels=pixels, clip=clip, t5=t5, window=window, threads=1)
    for pixels, (clip, t5), window in itertools.product((64, 32), (LONG, SHORT), (9, 2))
]
SETTINGS += [
    Setting(pixels=64, clip=LONG[0], t5=LONG[1], window=9, threads=2),
    Setting(pixels=32, clip=SHORT[0], t5=SHORT[1], window=2, threads=2),
]
QUICK = (SETTINGS[0], SETTINGS[7])


class Loop:
    """A loop in its process, which waits for its turn."""

    def __init__(self, name: str, setting: Setting, folder: Path) -> None:
        self.name, self._log = name, (folder / f"{name}.log").open("w")
        threads = str(setting.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "passive",
            "HF_HUB_OFFLINE": "1",
            "ACCELERATE_USE_CPU": "true",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("peer_loops.py")),
                name,
                encoded(setting),
                str(folder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            cwd=folder,
        )

    def answer(self) -> dict[str, float]:
        """What the epoch took; raises if the loop has ended."""
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended: {Path(self._log.name).read_text()[-3000:]}")
        return json.loads(line)

    def epoch(self) -> dict[str, float]:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


def write_work(setting: Setting, folder: Path) -> None:
    """The model and the prompts."""
    import build_pipeline
    from tiny_pipelines import build_tiny_sd3

    build_pipeline.MAX_TOKENS = setting.clip
    build_tiny_sd3(folder / "model")
    (folder / "prompts").mkdir()
    for split in ("train", "test"):
        (folder / "prompts" / f"{split}.txt").write_text("cat\ndog\nsun\nbee\n")
    (folder / "prompts/heldout.txt").write_text("owl\n")


def measure(setting: Setting, names: Sequence[str], repeats: int) -> dict[str, list[dict[str, float]]]:
    """The answers of each loop, turn by turn."""
    seen = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_work(setting, folder)
        loops: list[Loop] = []
        try:
            loops += [Loop(name, setting, folder) for name in names]
            for loop in loops:
                loop.answer()
            for turn in range(repeats):
                first = turn % len(loops)
                for loop in (*loops[first:], *loops[:first]):
                    seen[loop.name].append(loop.epoch())
        finally:
            for loop in loops:
                loop.close()
    return seen


def rows(setting: Setting, seen: dict[str, list[dict[str, float]]]) -> list[str]:
    """A line for each loop: its fastest epoch, and how many times as fast and as large the peers are."""
    lines = []
    for name, epochs in seen.items():
        ours = [""] * (2 * len(PEERS))
        if name in FLOWCORR:
            ours = [
                f"{_least(seen[peer], key) / _least(epochs, key):.2f}" if peer in seen else ""
                for key in ("cpu", "seconds")
                for peer in PEERS
            ]
        fastest = min(epochs, key=lambda epoch: epoch["cpu"])
        lines.append(
            f"| {setting.tokens} | {setting.window} | {setting.threads} | {name} | {fastest['rollout_cpu']:.2f} | "
            f"{fastest['cpu'] - fastest['rollout_cpu']:.2f} | {_least(epochs, 'seconds'):.2f} | {' | '.join(ours)} | "
            f"{max(epoch['memory'] for epoch in epochs):.0f} |"
        )
    return lines


def _least(epochs: list[dict[str, float]], key: str) -> float:
    return min(epoch[key] for epoch in epochs)


def main(settings: Sequence[Setting], names: Sequence[str], repeats: int) -> None:
    peers = [f"{peer}, {clock}" for clock in ("CPU", "s") for peer in PEERS]
    columns = (
        "tokens",
        "trained steps",
        "threads",
        "loop",
        "rollout CPU s",
        "update CPU s",
        "epoch s",
        *peers,
        "MB",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for setting in settings:
        able = [name for name in names if setting.window + LONGER.get(name, 0) <= STEPS]
        print("\n".join(rows(setting, measure(setting, able, repeats))), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two of the settings")
    parser.add_argument("--only", type=int, nargs="+", help="places of the settings, from 0")
    parser.add_argument("--loops", nargs="+", default=[*PEERS, *FLOWCORR])
    arguments = parser.parse_args()
    for name in arguments.loops:
        if name in PEERS and name.upper() not in os.environ:
            parser.error(
                f"{name} needs the path of its source tree in {name.upper()}, or leave it out by --loops"
            )
    chosen = QUICK if arguments.quick else SETTINGS
    if arguments.only:
        chosen = [SETTINGS[place] for place in arguments.only]
    main(chosen, arguments.loops, arguments.repeats)
