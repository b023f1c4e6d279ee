"""Dump the log-probs of another trainer and watch them; training stays as it is.

Copy `dump_and_watch` and the function of your trainer, and call it where its docstring says. It returns
`rollout_corr/*` for the trainer's own logger, and prints each finding once. Then read the folder:

    flowcorr audit my_dump        # how large is the gap, and what to do about it
    flowcorr report my_dump       # curves and findings
    flowcorr doctor my_dump --model PATH      # replays captured samples, and names the part that is wrong
"""

import torch
from accelerate.utils import gather_object
from peft import get_peft_model_state_dict

import flowcorr


def dump_and_watch(folder, step, *, replay=None, **terms):
    """Write a training step, with its captured samples if there are any, and return its metrics."""
    flowcorr.dump(folder, step, **terms, replay=replay)
    metrics, findings = flowcorr.watch(step, **terms)
    for finding in findings:
        print(finding)
    return metrics


def capture_verl_omni(data, config, adapter=None):
    """verl-omni: four samples for `flowcorr doctor`, in `_update_actor(self, data)`, for `dump_verl_omni`.

    In `forward` of its rollout pipeline, after `prepare_latents`: `noise = latents`, and before `rollout_output`:
    `rl |= {"initial_noise": noise, "final_latents": latents, "schedule":
    self.scheduler.sigmas.expand(len(latents), -1)}`. `adapter` is that of the actor, as
    `peft.get_peft_model_state_dict` names it; only its workers hold it.
    """
    batch, rollout = data.batch, config.actor_rollout_ref.rollout
    window = batch["all_timesteps"][0]  # each sample has its own; the doctor replays those of one
    rows = (batch["all_timesteps"] == window).all(1).nonzero()[:, 0].tolist()
    uids = data.non_tensor_batch["uid"].tolist()
    rows.sort(key=lambda row: uids[:row].count(uids[row]))  # of each prompt one, then a second one
    sigmas = batch["schedule"][0]
    timesteps = sigmas[:-1] * 1000
    return flowcorr.ReplaySamples(
        prompts=[data.non_tensor_batch["raw_prompt"][row][-1]["content"] for row in rows],
        negative_prompt="",
        guidance_scale=rollout.pipeline.guidance_scale,
        max_sequence_length=rollout.pipeline.max_sequence_length,
        initial_noise=batch["initial_noise"][rows],
        latents=batch["all_latents"][rows, :-1],
        next_latents=batch["all_latents"][rows, 1:],
        final_latents=batch["final_latents"][rows],
        log_probs=batch["rollout_log_probs"][rows],
        step_indices=(timesteps - window[:, None]).abs().argmin(1),
        images=batch["responses"][rows].permute(0, 2, 3, 1),
        rewards=batch["sample_level_rewards"][rows, 0],
        sigmas=sigmas,
        timesteps=timesteps,
        noise_level=rollout.algo.noise_level,
        sde_type=rollout.algo.sde_type,
        adapter=adapter or {},
        adapter_alpha=config.actor_rollout_ref.model.lora_alpha if adapter else None,
        dtype=rollout.dtype,
    )


def dump_verl_omni(folder, step, data, config, replay=None):
    """verl-omni: first in `_update_actor(self, data)`, with `self.global_steps` and `self.config`.

    It needs `actor_rollout_ref.rollout.calculate_log_probs=true`, and one run with `bypass_mode=false`: in bypass mode
    the trainer never sees the actor's own log-probs. Add the metrics to `actor_output` before `_update_actor` returns.
    """
    batch = data.batch
    return dump_and_watch(
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
        replay=replay,
    )


def capture_flow_grpo(prompts, images, latents, log_probs, rewards, transformer, pipeline, config):
    """flow_grpo: four samples for `flowcorr doctor`, right before `samples.append` of the epoch's first batch.

    `if i == 0: replay = capture_flow_grpo(prompts, images, latents, log_probs, rewards, transformer, pipeline, config)`
    """
    adapted = getattr(transformer, "module", transformer)  # under DistributedDataParallel
    return flowcorr.ReplaySamples(
        prompts=prompts,
        negative_prompt="",
        guidance_scale=config.sample.guidance_scale,
        max_sequence_length=128,
        initial_noise=latents[:, 0],
        latents=latents[:, :-1],  # all of its steps are SDE steps
        next_latents=latents[:, 1:],
        final_latents=latents[:, -1],
        log_probs=log_probs,
        images=images,
        rewards=rewards.result()[0]["avg"],
        sigmas=pipeline.scheduler.sigmas,
        timesteps=pipeline.scheduler.timesteps,
        noise_level=config.sample.noise_level,
        adapter=get_peft_model_state_dict(adapted),
        adapter_alpha=adapted.peft_config["default"].lora_alpha,
        dtype={"no": "float32", "fp16": "float16", "bf16": "bfloat16"}[config.mixed_precision],
    )


def dump_flow_grpo(folder, epoch, samples, current, fresh, accelerator, config, replay=None):
    """flow_grpo: at the end of the first inner epoch of the training loop; log the metrics with `wandb.log`.

    Before the loop over `samples_batched`: `current = torch.full_like(samples["log_probs"], torch.nan)`,
    `fresh = torch.zeros_like(current)` and `first = global_step`. In it, after `compute_log_prob`, what was scored, and
    whether that was before the epoch's first update: `current.unflatten(0, (len(samples_batched), -1))[i, :, j] =
    log_prob.detach()` and `fresh.unflatten(0, (len(samples_batched), -1))[i, :, j] = global_step == first`.
    """
    mine = {name: samples[name] for name in ("log_probs", "advantages", "timesteps")}
    gathered = _gather(mine | {"current": current, "fresh": fresh})
    if not accelerator.is_main_process:
        return {}
    return dump_and_watch(
        folder,
        epoch,
        rollout_log_probs=gathered["log_probs"],  # they are its old ones: bypass mode
        current_log_probs=gathered["current"],
        before_update=gathered["fresh"],
        advantages=gathered["advantages"],
        sigmas=gathered["timesteps"] / 1000,
        num_elements=samples["latents"][0, 0].numel(),
        clip_ratio=config.train.clip_range,
        replay=replay,
    )


def capture_flow_factory(samples, trainer, dtype="bfloat16"):
    """Flow-Factory: four samples for `flowcorr doctor`, right before `samples.extend` of the epoch's first batch.

    `if batch_index == 0: self.replay = capture_flow_factory(sample_batch, self)`, and before the loop, for noise and
    last latents: `trajectory_indices = [0, *trajectory_indices, self.training_args.num_inference_steps]`. `dtype`
    is that of its autocast: bfloat16, with `mixed_precision: "no"` too, or float16 with fp16.
    """
    scheduler, settings = trainer.adapter.scheduler, trainer.training_args
    steps, last = scheduler.train_timesteps, settings.num_inference_steps
    adapted = trainer.accelerator.unwrap_model(trainer.adapter.transformer)

    def latents(positions):
        return torch.stack([sample.all_latents[sample.latent_index_map[positions]] for sample in samples])

    return flowcorr.ReplaySamples(
        prompts=[sample.prompt for sample in samples],
        negative_prompt=[sample.negative_prompt or "" for sample in samples],
        guidance_scale=settings.guidance_scale,
        max_sequence_length=256,  # of SD3's; another family has its own
        initial_noise=latents(0),
        latents=latents(steps),
        next_latents=latents(steps + 1),
        final_latents=latents(last),
        log_probs=torch.stack([sample.log_probs[sample.log_prob_index_map[steps]] for sample in samples]),
        step_indices=steps,
        images=torch.stack([sample.image for sample in samples]),
        sigmas=scheduler.sigmas,
        timesteps=scheduler.timesteps,
        noise_level=scheduler.noise_level,
        adapter=get_peft_model_state_dict(adapted),
        adapter_alpha=adapted.peft_config["default"].lora_alpha,
        dtype=dtype,
    )


def dump_flow_factory(folder, epoch, samples, current, fresh, trainer, replay=None):
    """Flow-Factory: at the end of the first inner epoch of `optimize`; log the metrics with `self.log_data`.

    `samples` are its `shuffled_samples`, `trainer` is `self`. Before the loop over batches: `current =
    torch.full((len(samples), self.num_train_timesteps), torch.nan)`, `fresh = torch.zeros_like(current)` and
    `first = self.step`. In it, after `self.adapter.forward`: `current[start : start + len(batch_samples), idx] =
    output.log_prob.detach().cpu()` and `fresh[start : start + len(batch_samples), idx] = self.step == first`.
    """
    steps = trainer.adapter.scheduler.train_timesteps
    count, (low, high) = len(samples), trainer.training_args.clip_range
    gathered = _gather(
        {
            "rollout": torch.stack(
                [sample.log_probs[sample.log_prob_index_map[steps]] for sample in samples]
            ),
            "current": current,
            "fresh": fresh,
            "advantages": torch.stack([sample.extra_kwargs["advantage"] for sample in samples]),
            "sigmas": torch.stack([sample.timesteps[steps] for sample in samples]) / 1000,
            "groups": torch.tensor([sample.unique_id for sample in samples]),
            "indices": steps.expand(count, -1),
        }
    )
    if not trainer.accelerator.is_main_process:
        return {}
    return dump_and_watch(
        folder,
        epoch,
        rollout_log_probs=gathered["rollout"],  # they are its old ones: bypass mode
        current_log_probs=gathered["current"],
        before_update=gathered["fresh"],
        advantages=gathered["advantages"],
        group_ids=gathered["groups"],
        step_indices=gathered["indices"],
        sigmas=gathered["sigmas"],
        num_elements=samples[0].all_latents[0].numel(),
        clip_ratio=max(-low, high),
        replay=replay,
    )


def capture_unirl(req, track, sde_type="sde", adapter=None, adapter_alpha=None):
    """UniRL: four samples for `flowcorr doctor`, in `train_step` of its diffusion trainer, before `_drop_decoded`.

    Set `trajectory_precision: fp32` in its sampling: halves of float16 hide faults below their rounding. Only its
    workers hold the adapter.
    """
    from unirl.types.noise_recipe import NoiseRecipe
    from unirl.types.sampling import get_diffusion_params

    settings, segment = get_diffusion_params(req.sampling_params), track.segment
    stored, last = segment.indices.tolist(), settings.num_inference_steps
    texts = req.primitives["text"].texts
    each = len(track.sample_ids) // len(texts)  # its samples are in the order of their prompts
    noise = segment.latents_at(0) if 0 in stored else NoiseRecipe.from_rollout_req(req).resolve()
    steps = segment.sde_indices.tolist()

    def latents(offset):
        return torch.stack([segment.latents_at(step + offset) for step in steps], 1)

    return flowcorr.ReplaySamples(
        prompts=[text for text in texts for _ in range(each)],
        guidance_scale=settings.guidance_scale,
        max_sequence_length=settings.max_sequence_length,
        initial_noise=noise,
        latents=latents(0),
        next_latents=latents(1),
        final_latents=segment.latents_at(last) if last in stored else None,
        log_probs=segment.sde_logp,
        step_indices=steps,
        images=track.decoded.pixels,
        rewards=track.rewards,
        sigmas=segment.sigmas,
        noise_level=settings.eta,
        sde_type=sde_type,
        adapter=adapter or {},
        adapter_alpha=adapter_alpha,
        dtype={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[settings.autocast_precision],
    )


def dump_unirl(folder, step, track, old_log_probs, clip_ratio, replay=None):
    """UniRL: where `capture_unirl` is called, after `compute_advantages`; log the metrics with `self.wandb_logger`.

    `old_log_probs` `[B, S]` are those of the training stack, which `prepare_segment` leaves in `segment.sde_logp` with
    `old_logp_source: replay`. Copy the engine's before, since it overwrites them.
    """
    segment = track.segment
    return dump_and_watch(
        folder,
        step,
        rollout_log_probs=segment.sde_logp,
        old_log_probs=old_log_probs,
        advantages=track.advantages,
        rewards=track.rewards,
        group_ids=track.group_ids,
        step_indices=segment.sde_indices,
        sigmas=segment.sigmas[segment.sde_indices],
        num_elements=segment.latents[0, 0].numel(),
        clip_ratio=clip_ratio,
        replay=replay,
    )


def dump_miles_diffusion(folder, step, grids, clip_range):
    """miles_diffusion: after `_run_optim_window` of a rollout's first optimizer step; log with the others of `reduced`.

    `if step_id == 0: metrics = dump_miles_diffusion(folder, rollout_id, grids, clip_range)`. In `_forward_tile`, after
    `log_prob_new = log_prob_new_flat.reshape(...)`: `scored = grids.setdefault("scored",
    torch.full_like(grids["log_prob_old"], torch.nan))` and `scored[sample_indices[:, None], tstep_indices] =
    log_prob_new.detach()`. One optimizer step takes all tiles, so none was scored after an update.
    """
    gathered = _gather({name: grids[name] for name in ("log_prob_old", "scored", "advantage", "timesteps")})
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return {}
    return dump_and_watch(
        folder,
        step,
        rollout_log_probs=gathered["log_prob_old"],  # they are its old ones: bypass mode
        current_log_probs=gathered["scored"],
        before_update=torch.ones_like(gathered["scored"]),
        advantages=gathered["advantage"],
        sigmas=gathered["timesteps"] / 1000,
        num_elements=grids["latents"][0, 0].numel(),
        clip_ratio=clip_range,
    )


def dump_accelerate(folder, step, samples, accelerator, clip_ratio):
    """A loop with accelerate, such as accelerate_script.py: before the first update; log with `accelerator.log`."""
    names = ("log_probs", "old_log_probs", "advantages", "rewards", "groups")
    gathered = {name: accelerator.gather(samples[name]) for name in names}
    if not accelerator.is_main_process:
        return {}
    return dump_and_watch(
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


def _gather(mine):
    """The tensors of all processes, which may have different numbers of samples."""
    parts = gather_object([{name: values.cpu() for name, values in mine.items()}])
    return {name: torch.cat([part[name] for part in parts]) for name in mine}
