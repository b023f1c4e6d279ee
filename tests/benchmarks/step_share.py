"""Share of a default training step that correction, losses and metrics take, and what watches the images.

    python tests/benchmarks/step_share.py

Runs steps of `tiny_ocr_lora` on its embedded model, then times the correction, the loss with its backward
pass to the log-probs, and the metrics' `compute()` on tensors of the same shapes; then the statistics of images and
replays. Prints medians and ratios.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from flowcorr import config
from flowcorr.algorithm import apply_rollout_correction_to_diffusion_batch, diffusion_loss
from flowcorr.algorithm.terms import batch_terms
from flowcorr.metrics import Metrics
from flowcorr.records import ActorBatch, Scores
from flowcorr.rewards.statistics import image_metrics
from flowcorr.trainer.setup import build_run
from flowcorr.trainer.step import train_step
from tests.rollouts import make_rollout


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def batch_of(settings: config.Config) -> ActorBatch:
    """A batch of the recipe's shapes with a drift of 1e-4."""
    draw = torch.Generator().manual_seed(0)
    samples, steps = settings.rollout.prompts_per_step * settings.rollout.n, settings.sampling.sde_window_size
    groups = torch.arange(samples) // settings.rollout.n
    rollout = make_rollout(samples, steps, (4, 8, 16), group_ids=groups, means=None, stds=None).validate()
    old = rollout.log_probs + 1e-4 * torch.randn(samples, steps, generator=draw)
    return ActorBatch(rollout=rollout, advantages=torch.randn(samples, generator=draw), old_log_probs=old)


def own_work(settings: config.Config, batch: ActorBatch) -> None:
    """Everything of a step that is flowcorr's own: correction, losses, metrics."""
    correction = settings.algorithm.rollout_correction
    num_steps = settings.sampling.num_inference_steps
    corrected, metrics = apply_rollout_correction_to_diffusion_batch(
        batch, correction, actor_config=settings.actor, num_steps=num_steps
    )
    parts: list[Metrics] = [metrics]
    for half in torch.arange(batch.rollout.num_samples).chunk(settings.actor.mini_batches):
        mini = corrected.select(half)
        log_prob = mini.old_log_probs.clone().requires_grad_()
        ones = torch.ones_like(log_prob)
        scores = Scores(log_probs=log_prob, means=mini.rollout.window.latents, stds=ones)
        terms = batch_terms(mini, scores).per_term()
        output = diffusion_loss(terms, settings.actor, correction, num_steps=num_steps)
        output.loss_sum.backward()
        parts.append(output.metrics)
    Metrics(*parts).compute()


def main(repeats: int) -> None:
    settings = config.load(
        "tiny_ocr_lora", ["data.num_train=64", "data.num_heldout=8", "rollout.replay_every=0"]
    )
    settings = replace(settings, trainer=replace(settings.trainer, num_threads=1))
    run, _ = build_run(settings)
    run.engine.sync(run.actor.weights.snapshot())
    steps = iter(range(1, 2 * repeats + 3))
    train_step(run, next(steps), lambda _: None)
    step = median_seconds(lambda: train_step(run, next(steps), lambda _: None), repeats)
    batch = batch_of(settings)
    own_work(settings, batch)
    own = median_seconds(lambda: own_work(settings, batch), 20 * repeats)
    images, groups = train_step(run, next(steps), lambda _: None).images, batch.rollout.group_ids.numpy()
    measuring = median_seconds(
        lambda: image_metrics(images, groups, np.ones(len(images), dtype=bool)), 4 * repeats
    )
    run.config = replace(settings, rollout=replace(settings.rollout, replay_every=1))
    replays = [train_step(run, next(steps), lambda _: None).metrics.compute() for _ in range(repeats)]
    replay = statistics.median(values["timing/replay"] for values in replays)
    print(f"training step            {step * 1e3:9.1f} ms")
    print(f"correction+loss+metrics  {own * 1e3:9.2f} ms   {100 * own / step:.2f} % of the step")
    print(f"image statistics         {measuring * 1e3:9.2f} ms   {100 * measuring / step:.2f} % of the step")
    print(
        f"replay                   {replay * 1e3:9.2f} ms   {100 * replay / step:.2f} % of the step in which it runs"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    main(parser.parse_args().repeats)
