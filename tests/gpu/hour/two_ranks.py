"""Two ranks beside one: the same gradient of an adapter, and weights sharded by FSDP; by NCCL on two GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import torch

from tests.gpu.hour.parts import Hour, SkippedError
from tests.gpu.hour.paths import SMALL, metrics_of

COMPARED = ("reward/mean", "actor/grad_norm")
KINDS = {
    "adapter": (),
    "all weights": ("model.lora.rank=0", "actor.lr=1e-5"),
    "sharded weights": ("model.lora.rank=0", "actor.lr=1e-5", "actor.fsdp=true"),
    "sharded weights, autocast": (
        "model.lora.rank=0",
        "actor.lr=1e-5",
        "actor.fsdp=true",
        "actor.autocast=true",
    ),
}


def measure(hour: Hour) -> None:
    if hour.device.type == "cuda" and torch.cuda.device_count() < 2:
        raise SkippedError(f"needs two CUDA devices; there is {torch.cuda.device_count()}")
    kinds = dict(list(KINDS.items())[::2]) if hour.tiny else KINDS
    for kind, overrides in kinds.items():
        rows = []
        for ranks in (1, 2):
            folder = hour.folder / f"{kind.replace(' ', '_')}_{ranks}"
            shutil.rmtree(folder, ignore_errors=True)
            keys = [*SMALL, *overrides, f"trainer.device={hour.device.type}", "--out", str(folder)]
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            command = [sys.executable, *launch, "-m", "flowcorr", "train", "tiny_jpeg_lora", *keys]
            done = subprocess.run(
                command, env=os.environ, capture_output=True, text=True, check=False, timeout=240
            )
            if done.returncode:
                print(done.stdout, done.stderr)
                hour.row(f"{kind}, {ranks} ranks", "failed", failed=True, note=done.stderr.strip()[-300:])
                break
            rows.append(metrics_of(folder))
        if len(rows) < 2:
            continue
        one, two = rows
        for key in COMPARED:
            within = 0.05 if "autocast" in kind else 1e-3
            hour.row(f"{kind}: {key}, two ranks", two[0][key], expected=one[0][key], within=within)
        hour.row(
            f"{kind}: update, two ranks", two[1]["timing/update"], unit="s", expected=one[1]["timing/update"]
        )
