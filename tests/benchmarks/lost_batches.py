"""Batches whose answers vllm-omni loses: the real engine with large answers, beside a thread that keeps Python busy.

    /tmp/omni/bin/python tests/benchmarks/lost_batches.py [--batches 200] [--backend mp] [--size 4] [--timeout 20]

Each batch holds `--size` samples of the embedded model, of 300,000 floats each. `--backend mp` is vllm-omni's own
executor; without it flowcorr chooses. `/tmp/omni` is what `tests/rollout/vllm_omni/install.sh /tmp/omni` makes.
A batch counts as lost if it has no answer after `--timeout` seconds, several times what a batch takes.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

import torch

from flowcorr.actor import DiffusionActor
from flowcorr.config.rollout import RolloutConfig
from flowcorr.config.run import TrainerConfig
from flowcorr.config.schema import Config, ModelConfig, SamplingConfig
from flowcorr.errors import BackendError
from flowcorr.models import load_family
from flowcorr.rollout.vllm_omni.engine import VllmOmniEngine
from flowcorr.rollout.vllm_omni.probe import actor_probe
from tests.prompts import prompts_of

STEPS = 49  # of 2048 latents each, before and after it, with their means: 3 x 49 x 2048 floats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--backend")
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=20.0)
    arguments = parser.parse_args()
    backend = {"distributed_executor_backend": arguments.backend} if arguments.backend else {}
    config = Config(
        model=ModelConfig(path="tiny_ocr", max_sequence_length=8),
        sampling=SamplingConfig(
            height=64,
            width=128,
            num_inference_steps=STEPS + 1,
            sde_window_size=STEPS,
            sde_window_range=(0, STEPS),
        ),
        rollout=RolloutConfig(
            name="vllm_omni",
            engine=backend,
            prompts_per_step=arguments.size // 2,
            n=2,
            timeout=arguments.timeout,
        ),
        trainer=TrainerConfig(device="cpu"),
    )
    family = load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8))
    actor = DiffusionActor(family, config)
    rows = family.encode(prompts_of(["cat"] * (arguments.size // 2)), actor.guidance)
    engine = VllmOmniEngine(
        family,
        config,
        actor_probe=actor_probe(family, config, actor.weights.snapshot().tensors),
        merge=actor.weights.merged,
    )
    stop = threading.Event()
    threading.Thread(target=_keep_busy, args=(stop,), daemon=True).start()
    try:
        engine.sync(actor.weights.snapshot())
        seconds, lost = measure(engine, rows, arguments.batches)
    finally:
        stop.set()
        engine.close()
    print(
        f"{lost} of {arguments.batches} batches lost; a batch took {statistics.median(seconds or [0]):.2f} s"
    )


def measure(engine: VllmOmniEngine, rows: dict[str, torch.Tensor], batches: int) -> tuple[list[float], int]:
    """Seconds of the batches that were answered, and the number of the others."""
    seconds: list[float] = []
    lost = 0
    groups = range(len(next(iter(rows.values()))))
    for step in range(batches):
        begin = time.perf_counter()
        try:
            rollout = engine.sample(rows, groups, training_step=step, with_means=True)
        except BackendError as error:
            if "did not arrive" not in str(error):
                raise
            lost += 1
        else:
            seconds.append(time.perf_counter() - begin)
            assert rollout.window.means is not None
            floats = (
                rollout.window.latents[0].numel()
                + rollout.window.next_latents[0].numel()
                + rollout.window.means[0].numel()
            )
            if step == 0:
                print(f"{rollout.num_samples} answers a batch, {floats} floats an answer", flush=True)
        if step % 20 == 19:
            print(f"{step + 1} batches, {lost} lost", flush=True)
    return seconds, lost


def _keep_busy(stop: threading.Event) -> Any:
    while not stop.is_set():
        sum(range(1000))


if __name__ == "__main__":
    main()
