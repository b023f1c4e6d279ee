"""CPU seconds of sampling and decoding with longer steps after the window, as shares of the recipe's own.

    python -m tests.benchmarks.longer_steps [--repeats 5] [RECIPE [OVERRIDE ...]]

All lengths take turns on one batch of the recipe; of each its fastest turn counts, which other work on the machine
disturbed least.
"""

import argparse
import time
from dataclasses import replace

from flowcorr.config import Config, load
from flowcorr.data import load_prompts
from flowcorr.models import SamplingPlan
from flowcorr.trainer.setup import build_stacks, load_model


def measure(config: Config, repeats: int) -> dict[int, tuple[int, float]]:
    """The calls of the transformer and the CPU seconds of a batch, by length of the steps after the window."""
    prompts = load_prompts(config.data).train[: config.rollout.prompts_per_step]
    stacks = build_stacks(config, load_model(config), prompts)
    engine, conditioning, sampling = stacks.engine, stacks.cache(prompts), config.sampling
    engine.sync(stacks.actor.weights.snapshot())
    left = sampling.num_inference_steps - max(sampling.sde_window_range[1], sampling.noisy_steps.stop)
    lengths = [length for length in (1, 2, 3, left) if length <= left]
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    calls = {}
    for _ in range(repeats + 1):
        for length in lengths:
            engine.plan = SamplingPlan.of(stacks.actor.family, replace(sampling, post_window_stride=length))
            calls[length] = len(engine.plan.schedule.timesteps)
            begin = time.process_time()
            engine.sample(conditioning, range(len(prompts)), training_step=1, with_means=True)
            seconds[length].append(time.process_time() - begin)
    return {length: (calls[length], min(taken[1:])) for length, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("recipe", nargs="?", default="tiny_ocr_lora")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    found = measure(load(arguments.recipe, arguments.overrides), arguments.repeats)
    (_, own) = found[1]
    for length, (calls, seconds) in found.items():
        print(f"steps of {length}: {calls} calls, {seconds:.2f} s of CPU, {seconds / own:.2f}")


if __name__ == "__main__":
    main()
