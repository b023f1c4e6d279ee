"""Twelve faults for flow_grpo's loop, and the lines of `examples/dump_log_probs.py`: changes of its source text."""

from integrations.real_loops.change import Change

FILES = {"loop": "scripts/train_sd3.py", "sde": "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py"}

_LOADED, _STACKED = ("progress bar nicer", 0), ("latents = torch.stack(", 0)
_RELOAD = "pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, {})"
_NOISE, _LEVEL = "noise_level=config.sample.noise_level", "latents=one_noise(len(prompts))"
_PAST = "past.append(images); images = past[max(len(past) - 1 - config.sample.num_batches_per_epoch, 0)]"
_ROLLED = (
    "prompt_embeds, pooled_prompt_embeds = (x.roll(-1, 0) for x in (prompt_embeds, pooled_prompt_embeds))"
)
_UNSCALED = "pipeline.vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)"

FAULTS: dict[str, tuple[str, Change]] = {
    "stale_prompts": ("wrong_prompt", ("loop", ("prompt_ids = tokenizers", 1), "before", _ROLLED)),
    "swapped_images": ("swapped_images", ("loop", _STACKED, "before", "images = images.roll(1, 0)")),
    "decoder_unscaled": ("decoder_unscaled", ("loop", _LOADED, "before", _UNSCALED)),
    "other_schedule": (
        "other_schedule",
        ("loop", _LOADED, "before", _RELOAD.format("use_karras_sigmas=True")),
    ),
    "wrong_shift": ("wrong_shift", ("loop", _LOADED, "before", _RELOAD.format("shift=3.0"))),
    "guidance_off": (
        "guidance_off",
        ("loop", ("guidance_scale=config.sample.guidance_scale", 1), "instead", "guidance_scale=1.0"),
    ),
    "adapter_off": (
        "adapter_not_applied",
        ("loop", ("with autocast()", 1), "instead", "with autocast(), transformer.disable_adapter()"),
    ),
    "images_of_step_before": ("images_of_step_before", ("loop", _STACKED, "before", _PAST)),
    "noise_reused": ("noise_reused", ("loop", (_NOISE, 1), "instead", f"{_NOISE}, {_LEVEL}")),
    "log_probs_summed": ("log_probs_summed", ("sde", ("log_prob.mean(", 0), "instead", "log_prob.sum(")),
    "advantages_not_centred": (
        "advantages_not_centred",
        ("loop", ("stat_tracker.get_stats", 0), "before", "advantages = advantages + 1.0"),
    ),
    "half_sigma": (
        "rounded_sigmas",
        ("sde", ("self.sigmas[", None), "instead", "self.sigmas.half().float()["),
    ),
}
"""By name: the cause that the doctor gives it, and the change."""

_ROWS = "unflatten(0, (len(samples_batched), -1))[i, :, j]"
_CAPTURE = "capture_flow_grpo(prompts, images, latents, log_probs, rewards, transformer, pipeline, config)"
DUMP: tuple[Change, ...] = (
    (
        "loop",
        ("i, sample in", 0),
        "before",
        'current = torch.full_like(samples["log_probs"], torch.nan); fresh = torch.zeros_like(current); '
        "first = global_step",
    ),
    (
        "loop",
        ("config.train.beta > 0", 0),
        "before",
        f"current.{_ROWS} = log_prob.detach(); fresh.{_ROWS} = global_step == first",
    ),
    (
        "loop",
        ("make sure we did", 0),
        "before",
        "watched.append(dump_flow_grpo(folder, epoch, samples, current, fresh, accelerator, config, replay))",
    ),
    ("loop", ("samples.append(", 1), "before", f"if i == 0: replay = {_CAPTURE}"),
)
"""The lines that the docstrings of the example name."""
