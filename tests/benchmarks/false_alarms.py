"""What the doctor and the health rules say of stacks in which nothing is broken: it should be nothing.

    python tests/benchmarks/false_alarms.py --seeds 9001 9002
    python tests/benchmarks/false_alarms.py --seeds 9003 --steps 40 --out runs/clean     # keeps the runs
    python tests/benchmarks/false_alarms.py --judge runs/clean                           # their rules alone, in seconds

Examines a model and trains it for some steps, with an engine that has weights of its own, in 24 configurations: of the
embedded model in 17 precisions, windows, samplers and modes, and of seven families with tiny random weights, editing
and video among them (image editing needs torchvision: the environment of `tests/rollout/vllm_omni/install.sh`). Prints
a row for each configuration and seed with every check that did not pass and every rule that spoke. That the noise of a
coarse engine exceeds the clip range, and that rewards are alike, is true and no alarm; it stands in parentheses. Runs
stop at a fault, as by default; a stop is an alarm, and counted.
"""

import argparse
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flowcorr import config
from flowcorr.config.schema import Config
from flowcorr.errors import RolloutFault
from flowcorr.health.finding import Finding
from flowcorr.health.rules import HealthMonitor, is_step, units_of
from flowcorr.instruments.doctor.examination import diagnose
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import train
from flowcorr.trainer.events import EVENTS_FILE, read_events
from tests import tiny_pipelines

EMBEDDED = {
    "float32": ["rollout.emulate=none"],
    "bfloat16": ["model.dtype=bfloat16", "rollout.emulate=none"],
    "fp8": ["rollout.emulate=fp8"],
    "int8": ["rollout.emulate=int8"],
    "int4": ["rollout.emulate=int4"],
    "float32, guidance": ["rollout.emulate=none", "sampling.guidance_scale=4"],
    "bfloat16, guidance": ["model.dtype=bfloat16", "rollout.emulate=none", "sampling.guidance_scale=4"],
    "fp8, guidance": ["rollout.emulate=fp8", "sampling.guidance_scale=4"],
    "int4, guidance": ["rollout.emulate=int4", "sampling.guidance_scale=4"],
    "28 steps": ["rollout.emulate=none", "sampling.num_inference_steps=28"],
    "scattered": [
        "rollout.emulate=none",
        "sampling.sde_window_layout=scattered",
        "sampling.sde_window_size=3",
    ],
    "noise range": ["rollout.emulate=none", "sampling.sde_noise_range=[0,8]"],
    "bypass": ["algorithm.rollout_correction.preset=bypass_ppo_clip"],
    "bypass, bands": ["algorithm.rollout_correction.preset=bypass_ppo_clip_auto_rs"],
    "staleness": ["rollout.staleness=2"],
    "cps": ["rollout.emulate=none", "sampling.sde_type=cps"],
    "dance_sde": ["rollout.emulate=none", "sampling.sde_type=dance_sde", "sampling.noise_level=0.3"],
}
IN_BFLOAT16 = ["model.dtype=float32", "rollout.emulate=none"]  # beside a trainer in float32
FAMILIES = {
    "sd35, bypass": ("sd35_medium_ocr_lora_bypass", IN_BFLOAT16),
    "flux, int8": ("flux_dev_pickscore_lora", ["rollout.emulate=int8"]),
    "z_image, fp8": ("z_image_pickscore_lora", ["rollout.emulate=fp8"]),
    "wan, video": ("wan_ocr_lora", IN_BFLOAT16),
    "qwen_image_edit_plus, fp8": ("qwen_image_edit_plus_lora", ["rollout.emulate=fp8"]),
    "flux_kontext, editing": ("flux_kontext_edit_lora", IN_BFLOAT16),
    "flux2_klein, editing": (
        "flux2_klein_pickscore_lora",
        [*IN_BFLOAT16, "data.path=recipes/sign_edits.jsonl"],
    ),
}
"""Recipe and overrides, for the tiny random pipeline of its family in the recipe's bfloat16."""
CLEAN = (*EMBEDDED, *FAMILIES)
SIZES = ("clip", "clip_noise", "flat_groups")


@dataclass(frozen=True, slots=True)
class Said:
    """What was said of a configuration: alarms, sizes of an announced gap, and causes of a stop."""

    alarms: list[str]
    sizes: list[str]
    stops: list[str]

    def __str__(self) -> str:
        sizes = f" ({'; '.join(self.sizes)})" if self.sizes else ""
        stops = f" STOPPED by {', '.join(self.stops)}" if self.stops else ""
        return f"{'; '.join(self.alarms) or 'nothing'}{sizes}{stops}"


@dataclass(slots=True)
class Counts:
    """Configurations, and how many of them raised an alarm or were stopped."""

    rows: int = 0
    alarms: int = 0
    stops: int = 0

    def add(self, said: Said) -> None:
        self.rows += 1
        self.alarms += bool(said.alarms or said.stops)
        self.stops += bool(said.stops)

    def __str__(self) -> str:
        return f"{self.alarms} of {self.rows} with an alarm, {self.stops} stopped"


def said_in(findings: Iterable[Finding]) -> Said:
    alarms, sizes = list[str](), list[str]()
    for finding in findings:
        if finding.level in {"warning", "serious"}:
            (sizes if finding.cause in SIZES else alarms).append(
                f"{finding.cause} {finding.level}: {finding.sentence}"
            )
    return Said(alarms, sizes, [])


def configuration(name: str, seed: int, steps: int, models: Path) -> Config:
    """The configuration of a name; a family's tiny pipeline is written to `models` once."""
    common = [
        f"trainer.seed={seed}",
        f"trainer.total_steps={steps}",
        "trainer.eval_every=0",
        "trainer.doctor=false",
        "reward.placement=local",
    ]
    if name in EMBEDDED:
        return config.load("tiny_ocr_lora", [*EMBEDDED[name], *common])
    recipe, overrides = FAMILIES[name]
    tiny = tiny_pipelines.of_recipe(recipe)
    folder = models / tiny.build.__name__
    if not folder.exists():
        tiny.build(folder, dtype=torch.bfloat16)
    small = [
        *tiny_pipelines.overrides(folder, tiny.size, "bfloat16", tiny.frames),
        "rollout.name=in_process",
        "rollout.engine={}",
        "sampling.num_inference_steps=6",
        "data.num_heldout=2",
        "reward.gold=[]",
    ]
    return config.load(recipe, [*small, *overrides, *common])


def rules_that_speak(run_config: Config, records: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """The health lines of a run, as it prints them, from its metrics."""
    steps = list(filter(is_step, records))
    monitor = HealthMonitor(units_of(run_config, steps[0]))
    for metrics in steps:
        yield from monitor.update(metrics)


def judge(folder: Path) -> Said:
    """What the rules say of a run that was kept, and what stopped it."""
    said = said_in(
        rules_that_speak(config.load(folder / "config.yaml"), read_metrics(folder / "metrics.jsonl"))
    )
    faults = [event["causes"] for event in read_events(folder / EVENTS_FILE) if event["kind"] == "fault"]
    return replace(said, stops=[cause for causes in faults for cause in causes])


def main(seeds: Sequence[int], names: Sequence[str], steps: int, out: Path) -> None:
    counts = Counts()
    with TemporaryDirectory() as models:
        for seed in seeds:
            for name in names:
                begin = time.process_time()
                run_config = configuration(name, seed, steps, Path(models))
                folder = out / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
                examined = said_in(diagnose(run_config).findings)
                with suppress(RolloutFault):
                    train(run_config, folder)
                trained = judge(folder)
                said = Said(examined.alarms + trained.alarms, examined.sizes + trained.sizes, trained.stops)
                counts.add(said)
                print(f"{seed} | {name} | {said} | {time.process_time() - begin:.0f} s", flush=True)
    print(counts)


def judge_all(out: Path) -> None:
    counts = Counts()
    for folder in sorted(path.parent for path in out.glob("*/metrics.jsonl")):
        said = judge(folder)
        counts.add(said)
        print(f"{folder.name} | {said}")
    print(counts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    parser.add_argument("--only", nargs="+", choices=CLEAN, default=list(CLEAN))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep the runs in this folder")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="judge the runs that --out kept there")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    if arguments.judge is not None:
        judge_all(arguments.judge)
    else:
        with TemporaryDirectory() as scratch:
            main(arguments.seeds, arguments.only, arguments.steps, arguments.out or Path(scratch))
