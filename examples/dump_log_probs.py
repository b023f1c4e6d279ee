"""Dump the log-probs of another trainer for flowcorr's diagnosis; training stays as it is.

Copy the function of your trainer, call it where its docstring says, and read the folder:

    flowcorr audit my_dump        # how large is the gap, and what to do about it
    flowcorr lab my_dump          # what would each preset have done
    flowcorr report my_dump       # curves and findings
"""

import torch
from accelerate.utils import gather_object

import flowcorr


def dump_verl_omni(folder, step, data, config):
    """verl-omni: first in `_update_actor(self, data)`, with `self.global_steps` and `self.config`.

    It needs `actor_rollout_ref.rollout.calculate_log_probs=true`, and one run with `bypass_mode=false`: in bypass mode
    the trainer never sees the actor's own log-probs.
    """
    batch = data.batch
    flowcorr.dump(
        folder,
        step,
        rollout_log_probs=batch["rollout_log_probs"],
        old_log_probs=batch["old_log_probs"],
        advantages=batch["advantages"],
        rewards=batch["sample_level_rewards"],
        group_ids=data.non_tensor_batch["uid"],
        sigmas=batch["all_timesteps"] / 1000,
        num_elements=batch["all_latents"][0, 0].numel(),
        clip_ratio=config.actor_rollout_ref.actor.diffusion_loss.clip_ratio,
    )


def dump_flow_grpo(folder, epoch, samples, current, fresh, accelerator, config):
    """flow_grpo: at the end of the first inner epoch of the training loop.

    Before the loop over `samples_batched`: `current = torch.full_like(samples["log_probs"], torch.nan)`,
    `fresh = torch.zeros_like(current)` and `first = global_step`. In it, after `compute_log_prob`, what was scored, and
    whether that was before the epoch's first update: `current.unflatten(0, (len(samples_batched), -1))[i, :, j] =
    log_prob.detach()` and `fresh.unflatten(0, (len(samples_batched), -1))[i, :, j] = global_step == first`.
    """
    mine = {name: samples[name].cpu() for name in ("log_probs", "advantages", "timesteps")}
    mine |= {"current": current.cpu(), "fresh": fresh.cpu()}
    parts = gather_object([mine])  # processes may have left out different samples
    gathered = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if accelerator.is_main_process:
        flowcorr.dump(
            folder,
            epoch,
            rollout_log_probs=gathered["log_probs"],  # they are its old ones: bypass mode
            current_log_probs=gathered["current"],
            before_update=gathered["fresh"],
            advantages=gathered["advantages"],
            sigmas=gathered["timesteps"] / 1000,
            num_elements=samples["latents"][0, 0].numel(),
            clip_ratio=config.train.clip_range,
        )


def dump_accelerate(folder, step, samples, accelerator, clip_ratio):
    """A loop with accelerate, such as accelerate_script.py: before the first update of a step."""
    names = ("log_probs", "old_log_probs", "advantages", "rewards", "groups")
    gathered = {name: accelerator.gather(samples[name]) for name in names}
    if accelerator.is_main_process:
        flowcorr.dump(
            folder,
            step,
            rollout_log_probs=gathered["log_probs"],
            old_log_probs=gathered["old_log_probs"],
            advantages=gathered["advantages"],
            rewards=gathered["rewards"],
            group_ids=gathered["groups"],
            num_elements=samples["latents"][0, 0].numel(),
            clip_ratio=clip_ratio,
        )
