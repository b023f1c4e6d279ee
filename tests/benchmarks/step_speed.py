"""One training step of flowcorr beside the loop that FlowGRPO scripts write: images a second, and peak memory.

    python tests/benchmarks/step_speed.py [--repeats 9] [key=value ...]

Both sample the 96 images of a step of `tiny_jpeg_lora` and take its two optimizer steps on them, with the same
pipeline, adapter, transition, window and loss, in float32 on one thread. Before anything is timed they are given the
same noise, and must agree on images, log-probs and gradients. Rewards and advantages are the same for both and are
left out.

**plain** has the structure of Flow-GRPO's `scripts/train_sd3_fast.py` (github.com/yifan123/flow_grpo, 74db691): the
prompts of a batch are encoded; the batch is sampled step by step and decoded; then, for each micro-batch and each step
of the window, come a forward, a log-prob, the clipped loss, the script's five statistics and a backward, and an
optimizer step after each half. With guidance, both branches are concatenated for every forward. Its batch, for sampling
and training, is 8: all Stable Diffusion recipes of that code use 9, on 80 GB, which does not divide this recipe's 48
samples an update. The rows of 12 (a whole group) and 48 tell what the batch alone makes of it. What the scripts have
and this lacks could only slow it down: accelerate, autocast, log-probs of steps outside the window, progress bars.

**flowcorr** is `InProcessEngine` and `DiffusionActor` with the recipe's defaults in bypass mode, which does the same
work: the rollout's log-probs are the old ones. **decoupled** is the recipe as it stands, with the recomputed log-probs
and the correction. **unfolded** is bypass mode with a backward pass for each step. **less memory** samples 48 images at
a time and learns from 24, with both steps of their windows in one pass. **batch 8** is bypass mode in plain's batches.
Only the window is fixed, to the middle of the recipe's range, so that any batch has one window. Its lead comes
from prompts that are encoded once a run, larger batches, the steps before the window that the images of a prompt share
(as an older Flow-GRPO-Fast shared them), and the steps of the window in one forward. No advantage is 0 here.

The contenders take turns; the table has medians over the repeats. A ratio is the median of the ratios within each
repeat, by wall time and by CPU time, which other load on the machine disturbs less. Memory is the peak of three steps
in a process of its own, above that of the loaded pipeline, by the kernel's high-water mark.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from flowcorr import config, lora, sde
from flowcorr.actor import DiffusionActor
from flowcorr.algorithm import (
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
)
from flowcorr.correction import OFF
from flowcorr.models import load_family
from flowcorr.records import ActorBatch
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.setup import build_run

BATCHES = (8, 12, 48)
BYPASS = "algorithm.rollout_correction.preset=bypass_ppo_clip"
FLOWCORR = {
    "flowcorr": (BYPASS,),
    "flowcorr, decoupled": (),
    "flowcorr, unfolded": (BYPASS, "actor.fold_steps=false"),
    "flowcorr, less memory": (BYPASS, "rollout.batch_size=48", "actor.micro_batch_size=24"),
    "flowcorr, batch 8": (BYPASS, "rollout.batch_size=8", "actor.micro_batch_size=8"),
}
LATENTS = (4, 8, 16)
WORDS = ("cat", "dog", "sun", "moon", "tree", "fish", "bird", "road")
Noise = Callable[[int, list[int]], Tensor]
Seconds = dict[str, float]


def load(*overrides: str) -> config.Config:
    fixed = (
        "sampling.sde_window_range=[1,3]",
        "data.num_train=64",
        "data.num_heldout=8",
        "trainer.device=cpu",
    )
    return config.load("tiny_jpeg_lora", [*fixed, *overrides])


class Plain:
    """The script's loop.

    Args:
        settings: the recipe.
        batch: samples of a batch, in sampling and in training.
    """

    def __init__(self, settings: config.Config, batch: int) -> None:
        self.settings, self.batch = settings, batch
        self.family = load_family(settings.model)
        self.pipe = self.family.pipeline
        self.transformer = self.pipe.transformer
        lora.add_adapter(self.transformer, self.family, settings.model.lora, seed=settings.trainer.seed)
        self.parameters = {name: p for name, p in self.transformer.named_parameters() if p.requires_grad}
        actor = settings.actor
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=actor.lr, betas=actor.betas, weight_decay=actor.weight_decay
        )
        self.guidance = settings.sampling.guidance_scale
        self.pipe.scheduler.set_timesteps(settings.sampling.num_inference_steps)
        first = settings.sampling.sde_window_range[0]
        self.window = range(first, first + settings.sampling.sde_window_size)

    @torch.no_grad()
    def sample(self, prompts: Sequence[str], initial: Noise, noise: Noise) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = defaultdict(list)
        timesteps, sigmas = self.pipe.scheduler.timesteps, self.pipe.scheduler.sigmas
        for begin in range(0, len(prompts), self.batch):
            rows = list(range(begin, min(begin + self.batch, len(prompts))))
            embeds, negative, pooled, negative_pooled = self.pipe.encode_prompt(
                [prompts[row] for row in rows],
                None,
                None,
                negative_prompt="",
                do_classifier_free_guidance=self.guidance > 1,
                max_sequence_length=self.settings.model.max_sequence_length,
            )
            condition = {"embeds": embeds, "pooled": pooled}
            if self.guidance > 1:
                condition |= {"negative": negative, "negative_pooled": negative_pooled}
            latents, before, after, log_probs = initial(-1, rows), [], [], []
            for index, timestep in enumerate(timesteps):
                velocity = self.velocity(latents, timestep.expand(len(rows)), condition)
                if index in self.window:
                    drawn = noise(index, rows)
                    following, log_prob = self.sde_step(
                        velocity, timestep.expand(len(rows)), latents, noise=drawn
                    )
                    before.append(latents)
                    after.append(following)
                    log_probs.append(log_prob)
                else:
                    following = latents + (sigmas[index + 1] - sigmas[index]) * velocity
                latents = following
            latents = latents / self.pipe.vae.config.scaling_factor + self.pipe.vae.config.shift_factor
            pixels = self.pipe.vae.decode(latents, return_dict=False)[0]
            batch = condition | {
                "images": self.pipe.image_processor.postprocess(pixels, output_type="pt"),
                "timesteps": timesteps[list(self.window)].repeat(len(rows), 1),
                "latents": torch.stack(before, 1),
                "next_latents": torch.stack(after, 1),
                "log_probs": torch.stack(log_probs, 1),
            }
            for name, values in batch.items():
                parts[name].append(values)
        return {name: torch.cat(values) for name, values in parts.items()}

    def train(self, samples: dict[str, Tensor], order: Tensor) -> None:
        """Two optimizer steps on the samples in the given order, as `samples["advantages"]` `[B]` tells."""
        actor = self.settings.actor
        samples = {name: values[order] for name, values in samples.items()}
        batches = [
            {name: values[begin : begin + self.batch] for name, values in samples.items()}
            for begin in range(0, len(order), self.batch)
        ]
        accumulate = len(batches) // actor.mini_batches * len(self.window)
        info, seen = defaultdict(list), 0
        for batch in batches:
            for j in range(len(self.window)):
                velocity = self.velocity(batch["latents"][:, j], batch["timesteps"][:, j], batch)
                _, log_prob = self.sde_step(
                    velocity,
                    batch["timesteps"][:, j],
                    batch["latents"][:, j],
                    following=batch["next_latents"][:, j],
                )
                advantages = batch["advantages"].clamp(-actor.adv_clip_max, actor.adv_clip_max)
                ratio = torch.exp(log_prob - batch["log_probs"][:, j])
                clipped = torch.clamp(ratio, 1.0 - actor.clip_ratio, 1.0 + actor.clip_ratio)
                loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
                info["approx_kl"].append(0.5 * ((log_prob - batch["log_probs"][:, j]) ** 2).mean())
                info["clipfrac"].append((torch.abs(ratio - 1.0) > actor.clip_ratio).float().mean())
                info["clipfrac_gt_one"].append((ratio - 1.0 > actor.clip_ratio).float().mean())
                info["clipfrac_lt_one"].append((1.0 - ratio > actor.clip_ratio).float().mean())
                info["loss"].append(loss)
                (loss / accumulate).backward()
                seen += 1
                if seen % accumulate == 0:
                    torch.nn.utils.clip_grad_norm_(self.parameters.values(), actor.grad_clip)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    info = defaultdict(list)

    def velocity(self, latents: Tensor, timesteps: Tensor, condition: dict[str, Tensor]) -> Tensor:
        embeds, pooled = condition["embeds"], condition["pooled"]
        if self.guidance > 1:
            latents, timesteps = torch.cat([latents] * 2), torch.cat([timesteps] * 2)
            embeds = torch.cat([condition["negative"], embeds])
            pooled = torch.cat([condition["negative_pooled"], pooled])
        velocity = self.transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0].float()
        if self.guidance > 1:
            unconditional, text = velocity.chunk(2)
            velocity = unconditional + self.guidance * (text - unconditional)
        return velocity

    def sde_step(
        self,
        velocity: Tensor,
        timesteps: Tensor,
        latents: Tensor,
        *,
        noise: Tensor | None = None,
        following: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The next latents and their log-prob `[b]`; Flow-GRPO, arXiv:2505.05470, eq. 9."""
        scheduler = self.pipe.scheduler
        index = torch.tensor([scheduler.index_for_timestep(timestep) for timestep in timesteps])
        sigma, sigma_next = (scheduler.sigmas[i].view(-1, 1, 1, 1) for i in (index, index + 1))
        dt = sigma_next - sigma
        level = self.settings.sampling.noise_level
        std = torch.sqrt(sigma / (1 - torch.where(sigma == 1, scheduler.sigmas[1], sigma))) * level
        mean = (
            latents * (1 + std**2 / (2 * sigma) * dt)
            + velocity * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        )
        full = std * torch.sqrt(-dt)
        if following is None:
            assert noise is not None
            following = mean + full * noise
        log_prob = (
            -((following.detach() - mean) ** 2) / (2 * full**2) - full.log() - math.log(2 * math.pi) / 2
        )
        return following, log_prob.mean(dim=(1, 2, 3))


def plain_step(plain: Plain, prompts: Sequence[str], step: int) -> Seconds:
    draw = torch.Generator().manual_seed(step)
    count = plain.settings.rollout.n

    def initial(_: int, rows: list[int]) -> Tensor:  # one noise a prompt
        generators = [torch.Generator().manual_seed(step + row // count) for row in rows]
        return torch.stack([torch.randn(LATENTS, generator=generator) for generator in generators])

    begin = time.perf_counter()
    samples = plain.sample(prompts, initial, lambda _, rows: torch.randn(len(rows), *LATENTS, generator=draw))
    middle = time.perf_counter()
    samples["advantages"] = advantages(len(prompts))
    plain.train(samples, torch.randperm(len(prompts), generator=draw))
    return {"rollout": middle - begin, "update": time.perf_counter() - middle}


def flowcorr_step(run: TrainingRun, step: int) -> Seconds:
    actor, settings = run.actor, run.config
    begin = time.perf_counter()
    texts = [prompt.text for prompt in run.prompts.next(settings.rollout.prompts_per_step)]
    rollout = run.engine.sample(run.cache(texts), range(len(texts)), training_step=step, with_means=False)
    middle = time.perf_counter()
    batch = ActorBatch(rollout=replace(rollout, images=None), advantages=advantages(rollout.num_samples))
    batch = old_log_probs(actor, batch)
    recomputed = time.perf_counter()
    actor.update(batch, settings.algorithm.rollout_correction, training_step=step).compute()
    end = time.perf_counter()
    return {"rollout": middle - begin, "old_log_prob": recomputed - middle, "update": end - recomputed}


def old_log_probs(actor: DiffusionActor, batch: ActorBatch) -> ActorBatch:
    correction = actor.config.algorithm.rollout_correction
    assert correction is not None
    if correction.bypass_mode:
        return apply_bypass_mode_to_diffusion_batch(batch)
    batch = replace(batch, old_log_probs=actor.log_probs(batch.rollout).log_probs)
    corrected, _ = apply_rollout_correction_to_diffusion_batch(
        batch, correction, actor_config=actor.config.actor
    )
    return corrected


def advantages(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def build(name: str, overrides: Sequence[str]) -> Callable[[int], Seconds]:
    """A contender: `step -> seconds` of its phases."""
    if name in FLOWCORR:
        run, _ = build_run(load(*overrides, *FLOWCORR[name]))
        run.engine.sync(run.actor.weights.snapshot())
        return lambda step: flowcorr_step(run, step)
    plain = Plain(load(*overrides), int(name.removeprefix("plain ")))
    prompts = [word for word in WORDS for _ in range(plain.settings.rollout.n)]
    return lambda step: plain_step(plain, prompts, step)


def check_numerics(overrides: Sequence[str]) -> None:
    """Plain and flowcorr agree on log-probs, images and both gradients, given the same noise and weights."""
    settings = load(*overrides, *FLOWCORR["flowcorr"], "actor.lr=1e-30")
    run, _ = build_run(settings)
    actor, count = run.actor, settings.rollout.n
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in actor.weights.parameters.values():
            parameter.normal_(std=0.02, generator=generator)
    run.engine.sync(actor.weights.snapshot())
    drawn = run.prompts.next(settings.rollout.prompts_per_step)
    rollout = run.engine.sample(
        run.cache([prompt.text for prompt in drawn]), range(len(drawn)), training_step=1, with_means=False
    )
    ours = gradients_of(actor.optimizer.adamw.inner, actor.weights.parameters)
    batch = ActorBatch(rollout=rollout, advantages=advantages(rollout.num_samples))
    actor.update(apply_bypass_mode_to_diffusion_batch(batch), OFF, training_step=1)
    order = torch.cat(
        [
            torch.isin(rollout.group_ids, part.rollout.group_ids).nonzero().squeeze(1)
            for part in actor.optimizer.mini_batches(batch, 1, 0)
        ]
    )

    plain = Plain(settings, BATCHES[0])
    for name, parameter in plain.parameters.items():
        parameter.data.copy_(actor.weights.parameters[name])
    key = {"seed": settings.trainer.seed, "training_step": 1}

    def places(rows: list[int]) -> tuple[list[int], list[int]]:
        return [row // count for row in rows], [row % count for row in rows]

    samples = plain.sample(
        [prompt.text for prompt in drawn for _ in range(count)],
        lambda _, rows: sde.initial_noise(LATENTS, *places(rows), **key, same_in_group=True),
        lambda index, rows: sde.step_noise(LATENTS, *places(rows), **key, step_index=index),
    )
    theirs = gradients_of(plain.optimizer, plain.parameters)
    samples["advantages"] = batch.advantages
    plain.train(samples, order)

    assert rollout.images is not None
    levels = (samples["images"].permute(0, 2, 3, 1) * 255).round() - rollout.images.float()
    assert levels.abs().max() <= 1, f"images differ by {levels.abs().max()} levels"
    log_probs = (samples["log_probs"] - rollout.log_probs).abs().max().item()
    assert log_probs < 1e-5, f"log-probs differ by {log_probs:.1e}"
    assert len(ours) == len(theirs) == settings.actor.mini_batches
    distance = [(a - b).norm().item() / b.norm().item() for a, b in zip(ours, theirs, strict=True)]
    assert max(distance) < 1e-4, f"gradients differ by {max(distance):.1e} of their norm"
    print(
        f"numerics: log-probs to {log_probs:.0e}, gradients to {max(distance):.0e} of their norm\n",
        flush=True,
    )


def gradients_of(optimizer: torch.optim.Optimizer, parameters: dict[str, Tensor]) -> list[Tensor]:
    """Filled with the gradient of each optimizer step that is taken from now on."""
    seen: list[Tensor] = []

    def record(*_: object) -> None:
        gradients = (parameters[name].grad for name in sorted(parameters))
        seen.append(torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).clone())

    optimizer.register_step_pre_hook(record)
    return seen


def timed(step: Callable[[int], Seconds], index: int) -> Seconds:
    cpu = time.process_time()
    seconds = step(index)
    return seconds | {"step": sum(seconds.values()), "cpu": time.process_time() - cpu}


def peak_memory(name: str, overrides: Sequence[str]) -> float:
    """MB above the loaded pipeline at the worst moment of three steps, in a process of its own."""
    command = [sys.executable, __file__, "--memory", name, *overrides]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def measure_memory(name: str, overrides: Sequence[str]) -> None:
    step = build(name, overrides)
    loaded = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    for index in range(1, 4):
        step(index)
    print(resident("VmHWM") - loaded)


def resident(field: str) -> float:
    """A field of `/proc/self/status` in MB; `ru_maxrss` would begin with the parent's memory."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match.group(1)) / 1024


def main(repeats: int, overrides: Sequence[str]) -> None:
    torch.set_num_threads(1)
    check_numerics(overrides)
    names = [*FLOWCORR, *(f"plain {batch}" for batch in BATCHES)]
    steps = {name: build(name, overrides) for name in names}
    for step in steps.values():
        step(1)
    seen: dict[str, list[Seconds]] = defaultdict(list)
    for repeat in range(repeats):
        for name in [*names[repeat % len(names) :], *names[: repeat % len(names)]]:
            seen[name].append(timed(steps[name], repeat + 2))
    settings = load(*overrides)
    images = settings.rollout.prompts_per_step * settings.rollout.n

    def median(name: str, key: str) -> float:
        return statistics.median(entry.get(key, 0.0) for entry in seen[name])

    def ratio(name: str, key: str) -> str:
        ratios = sorted(
            theirs[key] / ours[key] for theirs, ours in zip(seen[name], seen["flowcorr"], strict=True)
        )
        return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})"

    print(
        "| | images/s | rollout s | old log-probs s | update s | CPU s | flowcorr is faster by | by CPU time | MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in names:
        phases = " | ".join(
            f"{median(name, key):.2f}" for key in ("rollout", "old_log_prob", "update", "cpu")
        )
        speed = f"{images / median(name, 'step'):.1f}"
        memory = f"{peak_memory(name, overrides):.0f}"
        print(
            f"| {name} | {speed} | {phases} | {ratio(name, 'step')} | {ratio(name, 'cpu')} | {memory} |",
            flush=True,
        )
    print(
        f"\nmedians of {repeats} repeats; ratios with their lowest and highest; the goal is 1.5 over plain {BATCHES[0]}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    if arguments.memory is None:
        main(arguments.repeats, arguments.overrides)
    else:
        torch.set_num_threads(1)
        measure_memory(arguments.memory, arguments.overrides)
