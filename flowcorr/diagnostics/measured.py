"""Measurements of a run beside the predictions of `flowcorr plan`: time and memory of each phase, and its arithmetic.

A run only logs its times. Its arithmetic is counted afterwards on the fake device, in a process of its own, since torch
cannot unregister that device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError
from flowcorr.plan.answers import Plan
from flowcorr.plan.devices import Gpu, find_gpu, known_gpu
from flowcorr.plan.estimate import make_plan
from flowcorr.trackers.jsonl import METRICS_FILE, read_metrics
from flowcorr.trainer.events import EVENTS_FILE, read_events
from flowcorr.trainer.run_config import read_config

PHASES = {
    "rollout": ("sample", "decode"),
    "old_log_prob": ("recompute",),
    "update": ("update",),
    "sync": ("sync",),
}
"""The phases that a run times, and those of a plan in each. Rewards overlap with others, and may be on any machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPhase:
    """One phase of a step.

    Attributes:
        name: as in `timing/<name>`.
        planned, measured: seconds.
        tflops: 1e12 floating point operations a second of one rank; None for a phase without arithmetic.
        share: of the device's peak; None where that is not known, as an impossible share says.
    """

    name: str
    planned: float
    measured: float
    tflops: float | None
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run beside its plan; the numbers are medians over its training steps without the first.

    Attributes:
        device: what computed it, and its peak in FLOP per second.
        peak: FLOP per second.
        ranks: training ranks.
        phases: in their order, and the whole step last.
        planned_images, measured_images: images a second.
        planned_memory, measured_memory: peak bytes of a rank in training; None where the run measured none.
    """

    device: str
    peak: float
    ranks: int
    phases: tuple[MeasuredPhase, ...]
    planned_images: float
    measured_images: float
    planned_memory: float
    measured_memory: float | None


def measure_run(folder: Path, gpu: str | None = None) -> MeasuredRun:
    """A run beside its plan, on the device that the run noted, or on the one that `gpu` describes.

    Raises:
        ConfigError: the folder holds no run, the run logged no second step, or its device is not known.
    """
    config = read_config(folder).config
    steps = _steps(folder)
    noted = _noted(folder)
    ranks = int(noted.get("ranks", 1))
    device = find_gpu(gpu) if gpu else _device(folder, noted)
    plan = make_plan(config, gpu=device, ranks=ranks, title=str(folder))
    return beside(plan, config, steps)


def beside(plan: Plan, config: Config, steps: Sequence[Mapping[str, Any]]) -> MeasuredRun:
    """The records of a run's training steps beside its plan."""
    peak = _peak(config, plan.gpu)

    def measured(metric: str) -> float | None:
        values = [record[metric] for record in steps if record.get(metric) is not None]
        return median(values) if values else None

    phases = []
    for name, parts in PHASES.items():
        seconds = measured(f"timing/{name}")
        if not seconds:
            continue
        flops = sum(phase.flops for phase in plan.phases if phase.name in parts)
        waits = plan.overlaps and name == "rollout"  # for what was sampled beside the last step
        rate = flops / seconds if flops and not waits else None
        phases.append(
            MeasuredPhase(
                name=name,
                planned=plan.seconds(*parts),
                measured=seconds,
                tflops=None if rate is None else rate / 1e12,
                share=None if rate is None or rate > peak else rate / peak,
            )
        )
    step = measured("timing/step") or 0.0
    phases.append(MeasuredPhase(name="step", planned=plan.seconds(), measured=step, tflops=None, share=None))
    memory = measured("perf/max_memory_gb")
    trained = ("idle", "reward", "recompute", "update", "sync")
    names = trained if plan.memory.engine else (*trained, "sample", "decode")
    images = config.rollout.prompts_per_step * config.rollout.n
    return MeasuredRun(
        device=plan.gpu.name,
        peak=peak,
        ranks=plan.ranks,
        phases=tuple(phases),
        planned_images=images / plan.seconds(),
        measured_images=measured("perf/images_per_second") or 0.0,
        planned_memory=max(getattr(plan.memory, name) for name in names),
        measured_memory=None if memory is None else memory * 2**30,
    )


def measure_apart(folder: Path) -> Mapping[str, Any] | None:
    """`measure_run` in a process of its own, as `flowcorr plan RUN --json` prints it; None where it has no answer."""
    if _noted(folder).get("device", "cpu") == "cpu":  # its speeds depend on the machine and on its load
        return None
    outcome = subprocess.run(
        [sys.executable, "-m", "flowcorr", "plan", str(folder), "--json"],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(outcome.stdout) if outcome.returncode == 0 else None


def _peak(config: Config, gpu: Gpu) -> float:
    half = config.actor.autocast or config.model.dtype != "float32"
    return gpu.bf16 if half else gpu.float32


def _steps(folder: Path) -> Sequence[Mapping[str, Any]]:
    path = folder / METRICS_FILE
    records = read_metrics(path) if path.is_file() else []
    steps = [record for record in records if record.get("timing/step") is not None][1:]
    if not steps:
        raise ConfigError(f"{path} has fewer than two training steps; let the run finish a second one first")
    return steps


def _noted(folder: Path) -> Mapping[str, Any]:
    """The last record of the run's device and ranks; empty if there is none."""
    path = folder / EVENTS_FILE
    starts = [event for event in read_events(path) if "device" in event] if path.is_file() else []
    return starts[-1] if starts else {}


def _device(folder: Path, noted: Mapping[str, Any]) -> Gpu:
    known = known_gpu(noted["device"], noted["memory"]) if "device" in noted else None
    if known is None:
        name = noted.get("device", "a device that it did not note")
        raise ConfigError(f"{folder} ran on {name}, whose speeds are not known; describe it with --gpu")
    return known
