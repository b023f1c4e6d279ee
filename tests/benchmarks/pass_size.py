"""Time of a sample and peak memory of a pass against the rows of the pass, on the embedded architecture.

    python tests/benchmarks/pass_size.py [--repeats 5]

A row is one image at one step. Guidance is on, so the transformer reads each row twice. Times are CPU time, of a
forward and a backward pass with an adapter, and of a forward pass without gradients; memory is that of the pass alone.
Each size of a pass has a process of its own, one thread.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from tests.benchmarks.memory import high_water, reset_high_water, resident

TOKENS = 77
SETTINGS = {
    "64 + 205 tokens": (TOKENS, "model.max_sequence_length=128", "sampling.height=64", "sampling.width=64"),
    "64 + 16 tokens": (8, "model.max_sequence_length=8", "sampling.height=64", "sampling.width=64"),
    "16 + 205 tokens": (TOKENS, "model.max_sequence_length=128", "sampling.height=32", "sampling.width=32"),
    "16 + 16 tokens": (8, "model.max_sequence_length=8", "sampling.height=32", "sampling.width=32"),
}
"""By image and text tokens: the prompt's length of the CLIP encoders, and overrides."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def measure(setting: str, rows: int, repeats: int) -> dict[str, float]:
    """CPU seconds a row with gradients and without, and MB of the pass with gradients."""
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples/tiny_ocr")]
    import build_pipeline
    from tiny_pipelines import build_tiny_sd3, connect

    from flowcorr import config

    torch.set_num_threads(1)
    build_pipeline.MAX_TOKENS, *overrides = SETTINGS[setting]
    with tempfile.TemporaryDirectory() as folder:
        path = build_tiny_sd3(Path(folder) / "model")
        settings = config.load(
            "tiny_ocr_lora",
            [
                *overrides,
                f"actor.micro_batch_size={rows}",
                f"model.path={path}",
                "model.lora.rank=32",
                "sampling.guidance_scale=4.5",
                "sampling.num_inference_steps=2",
                "sampling.sde_window_size=1",
                "sampling.sde_window_range=[0,1]",
                "rollout.emulate=none",
                "rollout.n=8",
                "rollout.batch_size=8",
            ],
        )
        _, actor, engine, conditioning = connect(settings, ["abc"])
    rollout = engine.sample(conditioning, [0], training_step=1, with_means=False)
    rollout = replace(rollout, images=None, final_latents=None)
    batch = rollout.select(torch.arange(rows) % 8)

    def learn() -> None:
        actor.score(batch).log_probs.sum().backward()

    actor.score(rollout.select(slice(1))).log_probs.sum().backward()
    before = resident()
    reset_high_water()
    learn()
    used = high_water() - before
    return {
        "learn": cpu_seconds(learn, repeats) / rows,
        "score": cpu_seconds(lambda: actor.log_probs(batch), repeats) / rows,
        "memory": used,
    }


def cpu_seconds(run, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def main(repeats: int, rows: tuple[int, ...]) -> None:
    print("| tokens | rows | tokens of a pass | ms a row, learning | scoring | MB |")
    print("|---|---|---|---|---|---|", flush=True)
    for setting in SETTINGS:
        tokens = 2 * sum(int(part) for part in setting.split() if part.isdigit())
        for count in rows:
            command = [sys.executable, __file__, "--measure", setting, str(count), "--repeats", str(repeats)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"| {setting} | {count} | {count * tokens} | {1e3 * found['learn']:.2f} | "
                f"{1e3 * found['score']:.2f} | {found['memory']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        setting, count = arguments.measure
        print(json.dumps(measure(setting, int(count), arguments.repeats)))
    else:
        main(arguments.repeats, tuple(arguments.rows))
