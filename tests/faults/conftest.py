"""Runs that are hurt on purpose, and the uninterrupted ones that they have to equal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.forks import exit_code
from tests.shallow import SHALLOW

if TYPE_CHECKING:
    from flowcorr.config.schema import Config

os.environ.setdefault("no_proxy", "127.0.0.1")  # before Ray's workers inherit it

STEPS = 6
SMALL = (
    f"model.path={SHALLOW}",
    "sampling.height=16",
    "sampling.width=32",
    "model.lora.rank=4",
    "sampling.num_inference_steps=4",
    "sampling.sde_window_range=[0, 3]",
    "rollout.prompts_per_step=4",
    "rollout.n=2",
    "rollout.batch_size=2",
    "data.num_train=9",
    "data.num_heldout=4",
    f"trainer.total_steps={STEPS}",
    "trainer.eval_every=3",
    "trainer.save_every=2",
    "trainer.image_every=0",
    "trainer.num_threads=1",  # in every process, so that all make the same calls
)


class Bench:
    """Starts runs of one small recipe, and compares what they leave."""

    SMALL = SMALL

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: dict[tuple[str, ...], Path] = {}

    def settings(self, *overrides: str) -> Config:
        from flowcorr import config

        return config.load("tiny_jpeg_lora", [*SMALL, *overrides])

    def whole(self, *overrides: str) -> Path:
        """The folder of an uninterrupted run in this process."""
        from flowcorr import trainer

        if overrides not in self._whole:
            folder = self.folder / f"whole_{len(self._whole)}"
            trainer.train(self.settings(*overrides), folder)
            self._whole[overrides] = folder
        return self._whole[overrides]

    def start(self, out: Path, *overrides: str, program: Sequence[str] = ("-m", "flowcorr")) -> Any:
        """A run in a process of its own."""
        command = [sys.executable, *program, "train", "tiny_jpeg_lora", *SMALL, *overrides, "--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def resume(self, out: Path) -> None:
        """Go on with the run in `out`, in a process of its own, by the command that the run itself names."""
        from flowcorr.trainer import run_folder

        program, *arguments = run_folder.resume_command(out).split()
        assert program == "flowcorr"
        assert exit_code(run_command, arguments) == 0

    def assert_same(self, out: Path, whole: Path) -> None:
        """Every step once, with the very same metrics; and the same weights in the end."""
        import torch
        from safetensors.torch import load_file

        ours, theirs = records(out), records(whole)
        assert [record["step"] for record in ours] == list(range(STEPS + 1))
        assert ours == theirs
        last = f"checkpoints/step_{STEPS:06d}/state.safetensors"
        weights, expected = load_file(out / last), load_file(whole / last)
        assert weights.keys() == expected.keys()
        differ = {name for name, value in weights.items() if not torch.equal(value, expected[name])}
        assert differ == set()
        assert list(out.rglob(".partial_*")) == []
        assert list(out.glob("*.tmp")) == []


def records(folder: Path) -> list[dict[str, Any]]:
    """A run's records, without what depends on the clock, or on which worker a group went to."""
    from flowcorr.trackers.jsonl import read_metrics

    varying = ("timing/", "perf/", "rollout_corr/worker_")
    return [
        {name: value for name, value in record.items() if not name.startswith(varying)}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def run_command(arguments: list[str]) -> None:
    from flowcorr.cli import main

    sys.exit(main(arguments))


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def events() -> Callable[..., list[Any]]:
    """`(folder)` -> kinds of its events; `(folder, kind)` -> the events of that kind."""
    from flowcorr.trainer.events import read_events

    def read(folder: Path, kind: str | None = None) -> list[Any]:
        found = read_events(folder / "events.jsonl")
        return [event["kind"] for event in found] if kind is None else [e for e in found if e["kind"] == kind]

    return read


@pytest.fixture
def wait_for() -> Callable[..., None]:
    def wait(condition: Callable[[], Any], seconds: float = 120.0, what: str = "what was waited for") -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
            time.sleep(0.02)

    return wait


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs to be root, and to be allowed to mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
