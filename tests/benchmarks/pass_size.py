"""CPU time of a row against the size of the pass, on the embedded architecture at twelve sizes of image and prompt.

    python tests/benchmarks/pass_size.py [--repeats 4] [--sizes 144+60 16+16]

A row is one image at one step. Guidance is on, so the transformer reads each row twice, and the tokens of a pass are
those of both halves. Times are of a forward and a backward pass with an adapter (learning), and of a forward pass
without gradients (sampling), as ratios to the best pass of that size: the fastest of the repeats, which take turns.
Each size has a process of its own, one thread. The last column is what a run chooses where nothing is set.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

SIZES = {
    "64+205": (64, 64, 77, 128),
    "16+205": (32, 32, 77, 128),
    "64+16": (64, 64, 8, 8),
    "16+16": (32, 32, 8, 8),
    "144+60": (96, 96, 30, 30),
    "144+16": (96, 96, 8, 8),
    "36+141": (48, 48, 77, 64),
    "256+32": (128, 128, 8, 24),
    "100+40": (80, 80, 20, 20),
    "25+64": (40, 40, 16, 48),
    "196+205": (112, 112, 77, 128),
    "128+24": (64, 128, 12, 12),
}
"""By image and text tokens: height, width, and tokens of the CLIP and T5 encoders."""
TOKENS = (500, 1000, 1500, 2000, 2500, 3000, 4000, 5000, 6500, 9000)


def measure(size: str, repeats: int) -> dict:
    """CPU milliseconds a row, learning and sampling, by the rows of a pass; and the rows that a run chooses."""
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples/tiny_ocr")]
    import build_pipeline
    from tiny_pipelines import build_tiny_sd3, connect

    from flowcorr import config
    from flowcorr.actor import pass_bound
    from flowcorr.rollout import in_process

    torch.set_num_threads(1)
    height, width, clip, t5 = SIZES[size]
    build_pipeline.MAX_TOKENS = clip
    with tempfile.TemporaryDirectory() as folder:
        settings = config.load(
            "tiny_ocr_lora",
            [
                f"model.path={build_tiny_sd3(Path(folder) / 'model')}",
                f"model.max_sequence_length={t5}",
                "model.lora.rank=32",
                f"sampling.height={height}",
                f"sampling.width={width}",
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
    of_row = 2 * ((height // 8) * (width // 8) + clip + t5)
    bound_on = pass_bound._largest_pass(actor.scorer, rollout)
    sampled = max(1, in_process.CPU_TOKENS // of_row)
    counts = sorted({max(1, round(tokens / of_row)) for tokens in TOKENS} | {bound_on, sampled})
    actor.scorer.rows = max(counts)  # no pass is cut
    batches = {rows: rollout.select(torch.arange(rows) % 8) for rows in counts}
    fastest = {rows: [math.inf, math.inf] for rows in counts}
    for repeat in range(repeats + 1):
        for rows, batch in batches.items():
            passes = max(1, round(8 / rows))
            works = (
                lambda batch=batch: actor.score(batch).log_probs.sum().backward(),
                lambda batch=batch: actor.log_probs(batch),
            )
            for place, work in enumerate(works):
                begin = time.process_time()
                for _ in range(passes):
                    work()
                taken = 1e3 * (time.process_time() - begin) / rows / passes
                if repeat:  # the first one warms up
                    fastest[rows][place] = min(fastest[rows][place], taken)
    return {"of_row": of_row, "fastest": fastest, "chosen": (bound_on, sampled)}


def main(repeats: int, sizes: list[str]) -> None:
    for size in sizes:
        command = [sys.executable, __file__, "--measure", size, "--repeats", str(repeats)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        fastest = {int(rows): times for rows, times in found["fastest"].items()}
        print(f"{size} tokens, tokens of a pass (rows):", end=" ")
        print(*(f"{rows * found['of_row']} ({rows})" for rows in fastest), sep=", ")
        for place, name in enumerate(("learning", "sampling")):
            best = min(times[place] for times in fastest.values())
            ratios = [f"{times[place] / best:.2f}" for times in fastest.values()]
            chosen = found["chosen"][place]
            print(f"  {name}: {', '.join(ratios)}; best {best:.2f} ms a row", end="; ")
            print(f"chosen {chosen} rows: {fastest[chosen][place] / best:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--measure", choices=SIZES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.repeats)))
    else:
        main(arguments.repeats, arguments.sizes)
