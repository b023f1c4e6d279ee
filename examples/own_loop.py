"""Rollout correction inside a FlowGRPO loop of your own: flowcorr's maths, none of its trainer.

    python examples/own_loop.py --steps 5
    python examples/own_loop.py --steps 5 --score-centering

The rollout engine here holds its weights in bfloat16 while training runs in float32. The loop measures that
gap, corrects for it by weights or by score centering, and prints both.
"""

import argparse
import copy

import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig

from flowcorr import sde
from flowcorr.advantages import group_advantages
from flowcorr.correction import compute_rollout_correction_and_rejection_mask
from flowcorr.losses import flow_grpo
from flowcorr.models import resolve_path

WINDOW, GROUPS, MEMBERS, NOISE_LEVEL = (1, 2), 4, 8, 0.7


def score_step(transformer, latents, index, sigmas, embeds, pooled):
    """The distribution of the next latents under `transformer`, and its velocity."""
    sigma, sigma_next = (sigmas[i].expand(len(latents)) for i in (index, index + 1))
    dtype = transformer.dtype
    velocity = transformer(
        latents.to(dtype), embeds.to(dtype), pooled.to(dtype), 1000 * sigma, return_dict=False
    )[0].float()
    return sde.transition("sde", latents, velocity, sigma, sigma_next, NOISE_LEVEL), velocity


@torch.no_grad()
def rollout(engine, sigmas, embeds, pooled, generator):
    """Ten steps, of which `WINDOW` is stochastic: the window's latents, log-probs and step means, and the result."""
    noise = torch.randn(GROUPS, 4, 8, 16, generator=generator).repeat_interleave(MEMBERS, 0)
    latents, window, log_probs, means = noise, [], [], []
    for index in range(10):
        step, velocity = score_step(engine, latents, index, sigmas, embeds, pooled)
        if index in WINDOW:
            following = sde.sample(step, torch.randn(latents.shape, generator=generator))
            window.append((latents, following))
            log_probs.append(sde.log_prob(following, step))
            means.append(step.mean)
        else:
            following = latents - (sigmas[index] - sigmas[index + 1]) * velocity
        latents = following
    return window, torch.stack(log_probs, 1), torch.stack(means, 1), latents


def recompute(policy, sigmas, window, embeds, pooled):
    """Log-probs `[B, T]`, step means `[B, T, *L]` and stds `[B, T]` of the window's steps under `policy`."""
    scored = []
    for index, (before, after) in zip(WINDOW, window, strict=True):
        step, _ = score_step(policy, before, index, sigmas, embeds, pooled)
        scored.append((sde.log_prob(after, step), step.mean, step.std))
    return [torch.stack(values, 1) for values in zip(*scored, strict=True)]


def main(steps: int, *, score_centering: bool = False) -> list[dict[str, float]]:
    generator = torch.Generator().manual_seed(0)
    pipe = StableDiffusion3Pipeline.from_pretrained(resolve_path("tiny_ocr"), use_safetensors=True)
    policy = pipe.transformer.requires_grad_(False)
    with torch.no_grad():
        embeds, _, pooled, _ = pipe.encode_prompt(
            ["ab", "cat", "dog", "wxyz"], None, None, do_classifier_free_guidance=False, max_sequence_length=8
        )
    embeds, pooled = embeds.repeat_interleave(MEMBERS, 0), pooled.repeat_interleave(MEMBERS, 0)
    engine = copy.deepcopy(policy).to(torch.bfloat16)  # samples with other arithmetic, and stays stale
    policy.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules=["to_q", "to_k", "to_v"]))
    optimizer = torch.optim.AdamW((p for p in policy.parameters() if p.requires_grad), lr=3e-4)
    pipe.scheduler.set_timesteps(10)
    history = []
    for step in range(steps):
        window, rollout_log_probs, rollout_means, final = rollout(
            engine, pipe.scheduler.sigmas, embeds, pooled, generator
        )
        rewards = -final.square().mean((1, 2, 3))  # a stand-in for your reward
        advantages = group_advantages(rewards, torch.arange(GROUPS).repeat_interleave(MEMBERS))

        with torch.no_grad():
            old_log_probs, _, _ = recompute(policy, pipe.scheduler.sigmas, window, embeds, pooled)
        correction = compute_rollout_correction_and_rejection_mask(
            old_log_probs, rollout_log_probs, rollout_is=None if score_centering else "sequence"
        )
        log_probs, means, stds = recompute(policy, pipe.scheduler.sigmas, window, embeds, pooled)
        if score_centering:  # the values stay; the gradient loses what pulls to the engine's policy
            log_probs = sde.centred_log_prob(log_probs, means, rollout_means, stds)
        loss = flow_grpo(
            log_probs,
            old_log_probs,
            advantages.float()[:, None].expand_as(old_log_probs),
            clip_ratio=1e-3,
            adv_clip_max=5.0,
            weight=correction.weights,
            keep=correction.keep,
        )
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        metrics = correction.metrics.merge(loss.metrics).compute() | {"reward": rewards.mean().item()}
        history.append(metrics)
        shown = ("reward", "rollout_corr/logprob_abs_diff_mean", "rollout_corr/rollout_is_eff_sample_size")
        print(
            f"step {step + 1}: "
            + "  ".join(f"{name} {metrics[name]:.4g}" for name in shown if name in metrics)
        )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--score-centering", action="store_true")
    arguments = parser.parse_args()
    main(arguments.steps, score_centering=arguments.score_centering)
