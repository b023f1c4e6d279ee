"""`rollout.cache=first_block`: how much of sampling it saves, and what it makes of images, rewards and log-probs.

    python tests/benchmarks/step_cache.py

Samples the 96 images of a step of `tiny_ocr_lora` with and without the cache, in turn, with the windows of the recipe.
Prints a row for each number of steps and threshold:

- CPU time beside sampling without the cache;
- share of the transformer's blocks that were computed;
- share of the images' values that differ by more than 8 of 255 levels, and that share between 24 of the images and the
  same images in a batch of their own, as the cache decides for a whole batch;
- mean reward, and the share of images whose reward differs;
- largest difference of the actor's log-probs from the rollout's, without and with the cache.
"""

import argparse
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flowcorr import config
from flowcorr.models.base import repeated_blocks
from flowcorr.records import Rollout
from flowcorr.rewards import score_batch
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.setup import build_run

PROMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """A rollout, the CPU seconds that it took, and the samples that went through each block, added up."""

    rollout: Rollout
    seconds: float
    blocks: int


def sample(run: TrainingRun, threshold: float | None, prompts: int = PROMPTS) -> Sampled:
    """Sample the first `prompts` with a threshold of the cache; None is without it."""
    cache = "none" if threshold is None else "first_block"
    run.engine.config = replace(run.config.rollout, cache=cache, cache_threshold=threshold or 1.0)
    passed: list[int] = []
    hooks = [
        block.attn.register_forward_pre_hook(
            lambda _, args, inputs: passed.append(len(inputs["hidden_states"])), with_kwargs=True
        )
        for block in repeated_blocks(run.engine.family.transformer)
    ]
    texts = [prompt.text for prompt in run.prompts.peek(prompts)]
    begin = time.process_time()
    rollout = run.engine.sample(run.cache(texts), range(prompts), training_step=1, with_means=False)
    seconds = time.process_time() - begin
    for hook in hooks:
        hook.remove()
    return Sampled(rollout=rollout, seconds=seconds, blocks=sum(passed))


def rewards(run: TrainingRun, rollout: Rollout) -> np.ndarray:
    prompts = [prompt for prompt in run.prompts.peek(PROMPTS) for _ in range(run.config.rollout.n)]
    return score_batch(run.reward, rollout.decoded.numpy(), prompts)[0].scores


def changed(images: Tensor, others: Tensor) -> float:
    return ((images.float() - others.float()).abs() > 8).double().mean().item()


def gap(run: TrainingRun, rollout: Rollout) -> float:
    return (run.actor.log_probs(rollout).log_probs - rollout.log_probs).abs().max().item()


def main(steps: list[int], thresholds: list[float], overrides: list[str], repeats: int) -> None:
    print(
        "| steps | threshold | time | blocks | values | in another batch | reward | differ | gap without, with |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for count in steps:
        keys = [f"sampling.num_inference_steps={count}", "reward.placement=local", "rollout.emulate=none"]
        run, _ = build_run(config.load("tiny_ocr_lora", [*keys, *overrides]))
        run.engine.sync(run.actor.weights.snapshot())
        settings = [None, *thresholds]
        drawn = [{threshold: sample(run, threshold) for threshold in settings} for _ in range(repeats)]
        plain = drawn[0][None]
        true = rewards(run, plain.rollout)
        images = plain.rollout.decoded
        for threshold in thresholds:
            cached = drawn[0][threshold]
            seconds = [min(turn[setting].seconds for turn in drawn) for setting in (threshold, None)]
            alone = sample(run, threshold, PROMPTS // 4).rollout.decoded
            found = rewards(run, cached.rollout)
            own = cached.rollout.decoded
            print(
                f"| {count} | {threshold} | {seconds[0] / seconds[1]:.2f} | {cached.blocks / plain.blocks:.2f} "
                f"| {changed(own, images):.1%} | {changed(own[: len(alone)], alone):.1%} "
                f"| {found.mean():.3f} instead of {true.mean():.3f} | {np.mean(found != true):.0%} "
                f"| {gap(run, plain.rollout):.0e}, {gap(run, cached.rollout):.0e} |",
                flush=True,
            )
        run.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 28])
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="such as sampling.sde_window_range=[0,14]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    main(arguments.steps, arguments.thresholds, arguments.overrides, arguments.repeats)
