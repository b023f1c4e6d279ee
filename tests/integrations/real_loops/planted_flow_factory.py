"""Twelve faults for Flow-Factory's loop, and the lines of `examples/dump_log_probs.py`: changes of its source text."""

from integrations.real_loops.change import Change

FILES = {
    "loop": "trainers/grpo.py",
    "model": "models/stable_diffusion/sd3_5.py",
    "sde": "scheduler/flow_match_euler_discrete.py",
    "advantages": "advantage/advantage_processor.py",
    "trainer": "trainers/abc.py",
}

_STEPS, _SAMPLES, _NOISE = (
    ("timesteps = set_scheduler_timesteps(", 0),
    ("# 8. Create samples", 0),
    ("# latents :", 0),
)
_ROLLED = (
    "prompt_embeds, pooled_prompt_embeds = (x.roll(-1, 0) for x in (prompt_embeds, pooled_prompt_embeds))"
)
_PAST = 'self.past = [*getattr(self, "past", []), images]; images = self.past[max(len(self.past) - 3, 0)]'
_CENTRED = "(combined_advantages - bn_mean) / bn_std"
_GUIDANCE = "guidance_scale=guidance_scale,\n                joint_attention_kwargs"
_ONE_NOISE = (
    "latents = torch.randn(latents[:1].shape, generator=torch.Generator().manual_seed(0))"
    ".expand_as(latents).clone()"
)

FAULTS: dict[str, tuple[str, Change]] = {
    "stale_prompts": ("wrong_prompt", ("model", ("batch_size = len(prompt_embeds)", 0), "before", _ROLLED)),
    "swapped_images": ("swapped_images", ("model", _SAMPLES, "before", "images = images.roll(1, 0)")),
    "decoder_unscaled": (
        "decoder_unscaled",
        (
            "model",
            (
                "(latents / self.pipeline.vae.config.scaling_factor) + self.pipeline.vae.config.shift_factor",
                0,
            ),
            "instead",
            "latents",
        ),
    ),
    "other_schedule": (
        "other_schedule",
        ("model", _STEPS, "before", "self.scheduler.register_to_config(use_karras_sigmas=True)"),
    ),
    "wrong_shift": ("wrong_shift", ("model", _STEPS, "before", "self.scheduler.set_shift(3.0)")),
    "guidance_off": (
        "guidance_off",
        ("model", (_GUIDANCE, 0), "instead", _GUIDANCE.replace("=guidance_scale", "=1.0")),
    ),
    "adapter_off": (
        "adapter_not_applied",
        (
            "loop",
            ("torch.no_grad(), self.autocast():", 0),
            "instead",
            "torch.no_grad(), self.autocast(), self.adapter.use_ref_parameters():",
        ),
    ),
    "images_of_step_before": ("images_of_step_before", ("model", _SAMPLES, "before", _PAST)),
    "noise_reused": ("noise_reused", ("model", _NOISE, "before", _ONE_NOISE)),
    "log_probs_summed": ("log_probs_summed", ("sde", ("log_prob.mean(", 0), "instead", "log_prob.sum(")),
    "advantages_not_centred": (
        "advantages_not_centred",
        ("advantages", (_CENTRED, 0), "instead", f"{_CENTRED} + 1.0"),
    ),
    "half_sigma": (
        "rounded_sigmas",
        (
            "sde",
            ("sigma = to_broadcast_tensor(sigma, latents)", 0),
            "before",
            "sigma, sigma_prev = sigma.half().float(), sigma_prev.half().float()",
        ),
    ),
}
"""By name: the cause that the doctor gives it, and the change."""

FLOAT32: Change = (
    "trainer",
    ("device_type=accelerator.device.type,", 0),
    "instead",
    "device_type='cpu', enabled=False,",
)
"""Without it the loop computes in bfloat16."""

_END = "\n    # =========================== Advantage Computation"
_ROWS = "[start : start + len(batch_samples), idx]"
DUMP: tuple[Change, ...] = (
    (
        "loop",
        ("from ..hparams import", 0),
        "before",
        "from dump_log_probs import capture_flow_factory, dump_flow_factory",
    ),
    (
        "loop",
        ("with torch.no_grad(), self.autocast()", 1),
        "before",
        "trajectory_indices = [0, *trajectory_indices, self.training_args.num_inference_steps]",
    ),
    (
        "loop",
        ("samples.extend(sample_batch)", 0),
        "before",
        "if batch_index == 0: self.replay = capture_flow_factory(sample_batch, self, 'float32')",
    ),
    (
        "loop",
        ("for batch_idx in tqdm(", 0),
        "before",
        "current = torch.full((len(shuffled_samples), self.num_train_timesteps), torch.nan); "
        "fresh = torch.zeros_like(current); first = self.step",
    ),
    (
        "loop",
        ("# 3. Compute loss", 0),
        "before",
        f"current{_ROWS} = output.log_prob.detach().cpu(); fresh{_ROWS} = float(self.step == first)",
    ),
    (
        "loop",
        (_END, 0),
        "instead",
        "            if inner_epoch == 0:\n"
        "                dump_flow_factory(\n"
        "                    os.environ['DUMP'], self.epoch, shuffled_samples, current, fresh, self, self.replay\n"
        f"                )\n{_END}",
    ),
)
"""The lines that the docstrings of the example name."""
