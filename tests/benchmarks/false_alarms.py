"""What the doctor and the health rules say of stacks in which nothing is broken: it should be nothing.

    python tests/benchmarks/false_alarms.py --seeds 9001 9002

Examines the embedded model and trains it for some steps, with an engine that has weights of its own, in 17
configurations: precisions, guidance, windows, samplers, modes, stale weights. Prints a row for each
configuration and seed with every check that did not pass and every rule that spoke. That the noise of a coarse engine
exceeds the clip range, and that rewards are alike, is true and no alarm; it stands in parentheses.
"""

import argparse
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flowcorr import config
from flowcorr.config.schema import Config
from flowcorr.instruments.doctor.examination import diagnose
from flowcorr.instruments.finding import Finding
from flowcorr.instruments.rules import HealthMonitor, units_of
from flowcorr.trainer.setup import build_run
from flowcorr.trainer.step import train_step

CLEAN = {
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
SIZES = ("clip", "clip_noise", "flat_groups")


@dataclass(frozen=True, slots=True)
class Said:
    """What was said of a configuration: alarms, and sizes of an announced gap."""

    alarms: list[str]
    sizes: list[str]


def said_of(run_config: Config, steps: int) -> Said:
    alarms, sizes = list[str](), list[str]()
    for finding in diagnose(run_config).findings:
        if finding.level in {"warning", "serious"}:
            text = f"{finding.cause} {finding.level}: {finding.sentence}"
            (sizes if finding.cause in SIZES else alarms).append(text)
    for rule in _rules_that_speak(run_config, steps):
        (sizes if rule.cause in SIZES else alarms).append(f"{rule.cause}: {rule}")
    return Said(alarms, sizes)


def _rules_that_speak(run_config: Config, steps: int) -> Iterator[Finding]:
    run, _ = build_run(run_config)
    try:
        run.engine.sync(run.actor.weights.for_engine())
        monitor: HealthMonitor | None = None
        for step in range(1, steps + 1):
            metrics = train_step(run, step, lambda _: None).metrics.compute()
            monitor = monitor or HealthMonitor(units_of(run_config, metrics))
            yield from monitor.update(metrics)
    finally:
        run.close()


def main(seeds: Sequence[int], names: Sequence[str], steps: int) -> None:
    wrong = rows = 0
    for seed in seeds:
        for name in names:
            begin = time.process_time()
            loaded = config.load(
                "tiny_ocr_lora", [*CLEAN[name], f"trainer.seed={seed}", "reward.placement=local"]
            )
            said = said_of(loaded, steps)
            rows += 1
            wrong += bool(said.alarms)
            sizes = f" ({'; '.join(said.sizes)})" if said.sizes else ""
            seconds = time.process_time() - begin
            print(
                f"{seed} | {name} | {'; '.join(said.alarms) or 'nothing'}{sizes} | {seconds:.0f} s",
                flush=True,
            )
    print(f"{wrong} of {rows} with an alarm")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--only", nargs="+", choices=CLEAN, default=list(CLEAN))
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    main(arguments.seeds, arguments.only, arguments.steps)
