"""Feature caching outside the window: how much of sampling it saves, and what it makes of the images.

    python tests/benchmarks/step_cache.py

Samples the 96 images of a step of `tiny_ocr_lora` with diffusers' `apply_first_block_cache` on all steps but those of
the window, before and after which its state is reset. The window's steps are computed in full, by the same module
without the cache. Prints the time beside sampling without a cache, the share of values that differ by more than 8 of
255 levels, and that share between the first 48 images and the same images sampled alone: the cache decides for a whole
batch at once.
"""

import argparse
import copy
import time
from typing import Any

from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, apply_first_block_cache
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from torch import Tensor, nn

from flowcorr import config
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.setup import build_run

STEPS, THRESHOLDS, WINDOW = (10, 28), (0.05, 0.1, 0.2), (1, 3)


class CachedOutside(nn.Module):
    """A transformer with a cache for the steps outside the window, and without one inside."""

    def __init__(self, transformer: nn.Module, threshold: float) -> None:
        super().__init__()
        self.exact, self.cached, self.step = transformer, copy.deepcopy(transformer), 0
        fill_in_text(self.cached.transformer_blocks[-1])
        apply_first_block_cache(self.cached, FirstBlockCacheConfig(threshold=threshold))
        self.hooks = HookRegistry.check_if_exists_or_initialize(self.cached)

    def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        inside = WINDOW[0] <= self.step < WINDOW[1]
        if self.step == WINDOW[1]:
            self.hooks.reset_stateful_hooks()
        self.step += 1
        _set_cache_context(
            self.cached, CacheContext("all")
        )  # what `CacheMixin` does, which SD3's transformer lacks
        return (self.exact if inside else self.cached)(**inputs)


def fill_in_text(block: nn.Module) -> None:
    """Let SD3's last block return text states, which the cache subtracts and nothing reads; it returns None."""
    compute = block.forward

    def forward(hidden_states: Tensor, encoder_hidden_states: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        return encoder_hidden_states, compute(hidden_states, encoder_hidden_states, **others)[1]

    block.forward = forward


def sample(run: TrainingRun, transformer: nn.Module, prompts: int) -> tuple[Tensor, float]:
    """Images, and seconds."""
    run.engine.family.pipeline.transformer = transformer
    texts = [prompt.text for prompt in run.prompts.peek(8)][:prompts]
    begin = time.perf_counter()
    rollout = run.engine.sample(run.cache(texts), range(prompts), training_step=1, with_means=False)
    return rollout.decoded.float(), time.perf_counter() - begin


def changed(images: Tensor, others: Tensor) -> float:
    return ((images - others).abs() > 8).double().mean().item()


def main(repeats: int) -> None:
    print("| steps | threshold | time | values that differ | in half a batch |\n|---|---|---|---|---|")
    for steps in STEPS:
        window = f"sampling.sde_window_range=[{WINDOW[0]},{WINDOW[1]}]"
        keys = [f"sampling.num_inference_steps={steps}", window, "rollout.batch_size=null"]
        run, _ = build_run(config.load("tiny_ocr_lora", keys))
        run.engine.sync(run.actor.weights.snapshot())
        exact = run.engine.family.transformer
        sampled = [sample(run, exact, 8) for _ in range(repeats)]
        plain, seconds = sampled[0][0], min(seconds for _, seconds in sampled)
        for threshold in THRESHOLDS:
            sampled = [sample(run, CachedOutside(exact, threshold), 8) for _ in range(repeats)]
            images, cached = sampled[0][0], min(seconds for _, seconds in sampled)
            half, _ = sample(run, CachedOutside(exact, threshold), 4)
            share = f"{changed(images, plain):.1%} | {changed(half, images[:48]):.1%}"
            print(f"| {steps} | {threshold} | {cached / seconds:.2f} | {share} |", flush=True)
        run.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    main(parser.parse_args().repeats)
