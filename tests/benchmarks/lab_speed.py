"""Time `flowcorr lab` on a synthetic run: all presets, one thread, by default 1,000 dumped steps of (512, 2).

    python tests/benchmarks/lab_speed.py [--steps 1000] [--samples 512] [--window 2] [--scales sqrt,sum]

Prints the seconds of the replay, reading included, and the most memory that the process took.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch

from flowcorr import dumps
from flowcorr.config import load, to_yaml
from flowcorr.diagnostics.lab import parse_scales, replay_run
from flowcorr.dumps import DumpedTerms, LoggedLoss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--scales", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        write_run(run_dir, arguments.steps, arguments.samples, arguments.window)
        begin = time.perf_counter()
        report = replay_run(run_dir, scales=parse_scales(arguments.scales) if arguments.scales else ())
        seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    shape = f"{arguments.steps} steps of ({arguments.samples}, {arguments.window})"
    print(f"{len(report.replays)} replays of {shape}: {seconds:.1f} s, {peak:.2f} GiB at most")


def write_run(run_dir: Path, steps: int, samples: int, window: int) -> None:
    """A run's folder with a drift of 3e-4 and updates of 1e-4 nats a latent element."""
    config = load("tiny_ocr_lora")
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    draw = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        rollout = torch.randn(samples, window, generator=draw)
        old = rollout + 3e-4 * torch.randn(samples, window, generator=draw)
        flat = torch.zeros(samples, window)
        terms = DumpedTerms(
            rollout_log_probs=rollout,
            old_log_probs=old,
            current_log_probs=old + 1e-4 * torch.randn(samples, window, generator=draw),
            advantages=torch.randn(samples, generator=draw),
            rewards=torch.rand(samples, generator=draw),
            timesteps=flat + 900,
            sigmas=flat + 0.9,
            sigmas_next=flat + 0.8,
            stds=flat + 0.3,
            step_indices=torch.arange(window).repeat(samples, 1),
            group_ids=torch.arange(samples) // 16,
            policy_versions=torch.full((samples,), step),
            num_elements=512,
            bypass=False,
        )
        dumps.save(run_dir / dumps.FOLDER, step, terms, LoggedLoss())


if __name__ == "__main__":
    main()
