"""vllm-omni on the device: weight sync in each way, sleep and wake, agreement with the actor, doctor and audit."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

import torch

from flowcorr import config as configs
from flowcorr.actor import DiffusionActor
from flowcorr.models import Conditioning, load_family
from flowcorr.records import Rollout
from flowcorr.rollout.vllm_omni.engine import VllmOmniEngine
from flowcorr.rollout.vllm_omni.probe import actor_probe
from tests import tiny_pipelines
from tests.gpu.hour import meter
from tests.gpu.hour.parts import Hour, SkippedError
from tests.prompts import prompts_of

SMALL = (
    *("rollout.name=vllm_omni", "rollout.prompts_per_step=2", "rollout.n=4", "actor.mini_batches=1"),
    *("reward.terms=[{name: jpeg_compressibility}]", "data.num_train=8", "data.num_heldout=4"),
)
MOST = {"float32": 1e-5, "bfloat16": 2e-2}
"""Nats an element between actor and engine, at most."""
WAYS = (("lora_tensors", "lora_path"), ("merged",))
"""Of weight sync; an adapter's two ways are tried on one engine."""


def measure(hour: Hour) -> None:
    if not installed():
        raise SkippedError("vllm-omni is not installed")
    device = f"trainer.device={hour.device}"
    for dtype in ("float32",) if hour.tiny else ("bfloat16", "float32"):
        for ways in WAYS:
            with hour.reported(f"{ways[0]}, {dtype}"):
                keys = [
                    f"model.dtype={dtype}",
                    f"rollout.dtype={dtype}",
                    f"rollout.engine.weight_sync={ways[0]}",
                ]
                _synced(hour, dtype, ways, [*SMALL, *keys, device])
    if hour.device.type == "cuda":
        with hour.reported("sleep"):
            _slept(hour, [*SMALL, "rollout.engine.enable_sleep_mode=true", device])
    else:
        hour.row("sleep", "skipped", note="an engine on a CPU cannot sleep")
    for recipe in ("qwen_image_ocr_lora_rollout_corr", "flux_dev_pickscore_lora"):
        tiny = tiny_pipelines.of_recipe(recipe)
        overrides = tiny_pipelines.overrides(tiny.build(hour.folder / recipe), tiny.size, "float32")
        _doctor(hour, recipe, [*overrides, "reward.gold=[]", device])
    _doctor(hour, "tiny_jpeg_lora", [*SMALL, device])
    _audit(hour, "tiny_jpeg_lora", [*SMALL, device])


def installed() -> bool:
    try:
        metadata.version("vllm-omni")
    except metadata.PackageNotFoundError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stack:
    actor: DiffusionActor
    engine: VllmOmniEngine
    conditioning: Conditioning

    def sample(self, step: int = 1) -> Rollout:
        return self.engine.sample(self.conditioning, (0, 1), training_step=step, with_means=True)

    def stir(self) -> None:
        """Move the weights, as training would."""
        tiny_pipelines.stir(self.actor, 0.02, seed=self.actor.weights.version)
        self.actor.weights.version += 1

    def sync(self) -> None:
        self.engine.sync(self.actor.weights.snapshot())

    def gap(self, step: int = 1) -> float:
        """Largest difference between the actor's log-probs and those that the engine samples with."""
        rollout = self.sample(step)
        return (self.actor.log_probs(rollout).log_probs - rollout.log_probs).abs().max().item()


@contextlib.contextmanager
def _running(overrides: Sequence[str]) -> Iterator[_Stack]:
    config = configs.load("tiny_jpeg_lora", list(overrides))
    family = load_family(config.model, config.trainer.device)
    actor = DiffusionActor(family, config)
    conditioning = family.encode(prompts_of(("cat", "dog")), actor.guidance)
    engine = VllmOmniEngine(
        family,
        config,
        actor_probe=actor_probe(family, config, actor.weights.snapshot().tensors),
        merge=actor.weights.merged,
    )
    try:
        stack = _Stack(actor=actor, engine=engine, conditioning=conditioning)
        stack.sync()
        yield stack
    finally:
        engine.close()


def _synced(hour: Hour, dtype: str, ways: Sequence[str], overrides: Sequence[str]) -> None:
    most = MOST[dtype]
    with _running(overrides) as stack:
        facts = ", ".join(f"{key} {value}" for key, value in stack.engine.describe().items())
        hour.row(f"{ways[0]}, {dtype}: computes with", facts)
        for way in ways:
            stack.engine.weight_sync = way
            name = f"{way}, {dtype}"
            hour.row(f"{name}: log-probs beside the actor's", stack.gap(), unit="nats", at_most=most)
            stack.stir()
            hour.row(f"{name}: with stale weights", stack.gap(), unit="nats")
            hour.row(f"{name}: sync", meter.seconds_once(hour.device, stack.sync), unit="s")
            hour.row(f"{name}: log-probs after it", stack.gap(), unit="nats", at_most=most)
            hour.row(
                f"{name}: sampling 8 images", meter.seconds(hour.device, stack.sample, repeats=2), unit="s"
            )


def _slept(hour: Hour, overrides: Sequence[str]) -> None:
    """Three training steps' worth of waking, syncing, sampling and sleeping, and the memory that sleep frees."""
    with _running(overrides) as stack:
        for step in range(3):
            name = f"sleep: log-probs of step {step} beside the actor's"
            hour.row(name, stack.gap(step), unit="nats", at_most=MOST["float32"])
            stack.stir()
            seconds = meter.seconds_once(hour.device, stack.sync)
            hour.row(f"sleep: waking, sync and sleeping of step {step}", seconds, unit="s")
        asleep = torch.cuda.mem_get_info(hour.device)[0]
        stack.engine.client.wake_up()
        awake = torch.cuda.mem_get_info(hour.device)[0]
        hour.row("sleep: free memory gained", (asleep - awake) / 1e9, unit="GB")


def _doctor(hour: Hour, recipe: str, overrides: Sequence[str]) -> None:
    code, report = _command("doctor", recipe, [*overrides, "--prompts", "2"])
    if report is None:
        hour.row(f"doctor {recipe}", code, failed=True, note="see the log")
        return
    hour.row(f"doctor {recipe}", code, unit="exit code", at_most=1)
    for finding in report["findings"]:
        if finding["level"] in ("warning", "serious"):
            hour.row(
                f"doctor {recipe}: {finding['cause']}",
                finding["level"],
                failed=finding["level"] == "serious",
                note=finding["sentence"],
            )


def _audit(hour: Hour, recipe: str, overrides: Sequence[str]) -> None:
    code, report = _command(
        "audit", recipe, [*overrides, "--batches", "1", "--out", str(hour.folder / "audit")]
    )
    if report is None:
        hour.row(f"audit {recipe}", code, failed=True, note="see the log")
        return
    hour.row(f"audit {recipe}", report["verdict"])


def _command(name: str, recipe: str, arguments: Sequence[str]) -> tuple[int, dict | None]:
    """A command's exit code and the JSON that it prints; None if it prints none."""
    command = [sys.executable, "-m", "flowcorr", name, recipe, *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    print(done.stderr[-3000:])
    try:
        return done.returncode, json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        print(done.stdout)
        return done.returncode, None
