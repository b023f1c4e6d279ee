"""FlowGRPO with accelerate in one script, as such scripts are written, with flowcorr's measurement and correction.

    python examples/accelerate_script.py --epochs 5
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_script.py --epochs 5    # without a GPU too

Sampling runs under bfloat16 autocast, training in float32. `# +` heads each statement that flowcorr adds to such a
script: the recomputed log-probs, the correction, and a loss that takes its outcome. One process and two print the
same numbers: a prompt's samples are spread over processes, each brings its own noise, and sums and counts are added
over all processes.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig

from flowcorr import sde
from flowcorr.advantages import group_advantages
from flowcorr.correction import compute_rollout_correction_and_rejection_mask
from flowcorr.losses import flow_grpo
from flowcorr.models import resolve_path
from flowcorr.rewards.jpeg import jpeg_kilobytes

PROMPTS, MEMBERS, BATCH, UPDATES = ["ab", "cat", "dog", "wxyz"], 8, 8, 2
STEPS, WINDOW, NOISE_LEVEL, SHAPE = 10, (1, 2), 0.7, (4, 8, 16)


def score_step(transformer, latents, index, sigmas, embeds, pooled):
    """The distribution of the next latents under `transformer`, and its velocity."""
    sigma, sigma_next = (sigmas[i].expand(len(latents)) for i in (index, index + 1))
    velocity = transformer(latents, embeds, pooled, 1000 * sigma, return_dict=False)[0].float()
    return sde.transition("sde", latents, velocity, sigma, sigma_next, NOISE_LEVEL), velocity


@torch.no_grad()
def sample(pipe, transformer, rows, embeds, pooled, epoch):
    """A batch of images with the latents and log-probs of the window, and their rewards."""
    groups, members = [row // MEMBERS for row in rows], [row % MEMBERS for row in rows]
    key, device = {"seed": 0, "training_step": epoch}, embeds.device
    embeds, pooled, sigmas = embeds[groups], pooled[groups], pipe.scheduler.sigmas
    latents = sde.initial_noise(SHAPE, groups, members, **key).to(device)
    before, after, log_probs = [], [], []
    for index in range(STEPS):
        with torch.autocast(device.type, torch.bfloat16):
            step, velocity = score_step(transformer, latents, index, sigmas, embeds, pooled)
        if index in WINDOW:
            noise = sde.step_noise(SHAPE, groups, members, **key, step_index=index).to(device)
            following = sde.sample(step, noise)
            before.append(latents)
            after.append(following)
            log_probs.append(sde.log_prob(following, step))
        else:
            following = latents - (sigmas[index] - sigmas[index + 1]) * velocity
        latents = following
    latents = latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
    images = pipe.image_processor.postprocess(pipe.vae.decode(latents).sample, output_type="np")
    return {
        "embeds": embeds,
        "pooled": pooled,
        "latents": torch.stack(before, 1),
        "next_latents": torch.stack(after, 1),
        "log_probs": torch.stack(log_probs, 1),
        "rewards": -torch.tensor(jpeg_kilobytes((255 * images).round().astype("uint8")), device=device),
        "groups": torch.tensor(groups, device=device),
    }


def compute_log_prob(transformer, batch, j, sigmas):
    """Log-probs `[b]` of the window's step `j` under `transformer`."""
    inputs = batch["latents"][:, j], WINDOW[j], sigmas, batch["embeds"], batch["pooled"]
    return sde.log_prob(batch["next_latents"][:, j], score_step(transformer, *inputs)[0])


def main(epochs: int) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    total = len(PROMPTS) * MEMBERS
    if total % (BATCH * UPDATES * world):
        raise SystemExit(f"{world} processes cannot share {total} samples in batches of {BATCH}; use 1 or 2")
    batches_an_update = total // (BATCH * UPDATES * world)
    accelerator.gradient_accumulation_steps = batches_an_update * len(WINDOW)
    set_seed(0)

    pipe = StableDiffusion3Pipeline.from_pretrained(resolve_path("tiny_ocr"), use_safetensors=True).to(device)
    with torch.no_grad():
        embeds, _, pooled, _ = pipe.encode_prompt(
            PROMPTS, None, None, do_classifier_free_guidance=False, max_sequence_length=8
        )
    pipe.transformer.requires_grad_(False)
    pipe.transformer.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules=["to_q", "to_k", "to_v"]))
    parameters = [parameter for parameter in pipe.transformer.parameters() if parameter.requires_grad]
    transformer, optimizer = accelerator.prepare(pipe.transformer, torch.optim.AdamW(parameters, lr=3e-4))
    pipe.scheduler.set_timesteps(STEPS, device=device)
    sigmas = pipe.scheduler.sigmas

    for epoch in range(1, epochs + 1):
        mine = range(rank, total, world)
        batches = [
            sample(pipe, pipe.transformer, mine[i : i + BATCH], embeds, pooled, epoch)
            for i in range(0, len(mine), BATCH)
        ]
        samples = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        rewards, groups = accelerator.gather(samples["rewards"]), accelerator.gather(samples["groups"])
        advantages = group_advantages(rewards, groups).float()
        samples["advantages"] = advantages.view(world, -1)[rank]

        # + The training stack's own log-probs [B, T], a micro-batch and a step at a time.
        with torch.no_grad():
            scores = [
                [compute_log_prob(transformer, batch, j, sigmas) for j in range(len(WINDOW))]
                for batch in batches
            ]
        samples["old_log_probs"] = torch.cat([torch.stack(columns, 1) for columns in scores])
        # + Measured against the rollout's: importance weights, what to leave out, and all metrics of the gap.
        correction = compute_rollout_correction_and_rejection_mask(
            samples["old_log_probs"], samples["log_probs"], rollout_is="sequence", rollout_is_threshold=2.0
        )
        samples |= {"weights": correction.weights, "keep": correction.keep}
        metrics = correction.metrics

        for rows in torch.arange(len(mine), device=device).chunk(UPDATES):
            # + Terms of this update on all processes, for a mean that is exact whatever was left out where.
            kept = accelerator.reduce(samples["keep"][rows].sum())
            for batch_rows in rows.split(BATCH):
                batch = {name: values[batch_rows] for name, values in samples.items()}
                for j in range(len(WINDOW)):
                    with accelerator.accumulate(transformer):
                        # + In place of ratio, clamp and maximum.
                        loss = flow_grpo(
                            compute_log_prob(transformer, batch, j, sigmas),
                            batch["old_log_probs"][:, j],
                            batch["advantages"],
                            clip_ratio=1e-3,
                            adv_clip_max=5.0,
                            weight=batch["weights"][:, j],
                            keep=batch["keep"][:, j],
                        )
                        # accelerate divides by the parts of an update and averages over processes; the loss is a sum.
                        parts = accelerator.gradient_accumulation_steps * world
                        accelerator.backward(loss.loss_sum * parts / kept.clamp(min=1))
                        if accelerator.sync_gradients:
                            grad_norm = accelerator.clip_grad_norm_(transformer.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()
                    metrics = metrics.merge(loss.metrics)

        # + Sums of all processes, exact, by one collective and one copy to the host.
        logged = metrics.across_ranks().compute()
        logged |= {"reward": rewards.mean().item(), "grad_norm": grad_norm.item()}
        gap = ("rollout_corr/logprob_abs_diff_mean", "rollout_corr/rollout_is_mean")
        names = ("reward", *gap, "actor/ppo_kl", "grad_norm")
        accelerator.print(
            f"epoch {epoch}, {world} processes: " + "  ".join(f"{name} {logged[name]:.6g}" for name in names)
        )
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args().epochs)
