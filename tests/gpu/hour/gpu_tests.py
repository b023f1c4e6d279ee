"""The tests that need a GPU, each a row."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from tests.gpu.hour.command import ROOT
from tests.gpu.hour.parts import Hour, SkippedError


def measure(hour: Hour) -> None:
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise SkippedError("pytest or hypothesis is not installed")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu or multi_gpu",
        "-rA",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    files = ["tests/gpu/test_cuda.py", "tests/distributed/test_ranks.py"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    for line in done.stdout.splitlines():
        word, _, test = line.partition(" ")
        if word in ("PASSED", "FAILED", "ERROR", "SKIPPED"):
            hour.row(test.rpartition("/")[2], word.lower(), failed=word in ("FAILED", "ERROR"))
    if done.returncode not in (0, 1):
        hour.row("pytest", done.returncode, failed=True, note=(done.stdout + done.stderr).strip()[-300:])
