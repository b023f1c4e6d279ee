"""Twelve faults for verl-omni's loop, and the lines of `examples/dump_log_probs.py`: changes of its source text."""

from integrations.real_loops.change import Change

FILES = {
    "pipeline": "pipelines/sd3_flow_grpo/vllm_omni_rollout_adapter.py",
    "sde": "pipelines/schedulers/flow_match_sde.py",
    "advantages": "trainer/diffusion/diffusion_algos.py",
    "trainer": "trainer/diffusion/v1/trainer_base.py",
}

_ENCODED = ("prompt_embeds_mask = torch.ones(", 0)
_NOISE, _DECODED = ("timesteps, num_inference_steps = self.prepare_timesteps(", 0), ("rl = {}", 0)
_SCHEDULE = "def set_timesteps(self, *args, **kwargs): self.{}; return super().set_timesteps(*args, **kwargs)"
_ROLLED = (
    "prompt_embeds, pooled_prompt_embeds = (x.roll(-1, 0) for x in (prompt_embeds, pooled_prompt_embeds))"
)
_PAST = 'self.past = [*getattr(self, "past", []), output]; output = self.past[max(len(self.past) - 2, 0)]'
_ONE_NOISE = (
    "latents = torch.randn(latents[:1].shape, generator=torch.Generator().manual_seed(0))"
    ".expand_as(latents).clone()"
)
_GUIDANCE = "do_cfg,\n                guidance_scale,\n                positive_kwargs"

FAULTS: dict[str, tuple[str, Change]] = {
    "stale_prompts": ("wrong_prompt", ("pipeline", _ENCODED, "before", _ROLLED)),
    "swapped_images": ("swapped_images", ("pipeline", _DECODED, "before", "output = output.roll(1, 0)")),
    "decoder_unscaled": (
        "decoder_unscaled",
        (
            "pipeline",
            ("(latents / self.vae.config.scaling_factor) + self.vae.config.shift_factor", 0),
            "instead",
            "latents",
        ),
    ),
    "other_schedule": (
        "other_schedule",
        ("sde", ("def step(", 0), "before", _SCHEDULE.format("register_to_config(use_karras_sigmas=True)")),
    ),
    "wrong_shift": (
        "wrong_shift",
        ("sde", ("def step(", 0), "before", _SCHEDULE.format("set_shift(3.0)")),
    ),
    "guidance_off": (
        "guidance_off",
        ("pipeline", (_GUIDANCE, 0), "instead", _GUIDANCE.replace("guidance_scale", "1.0")),
    ),
    "adapter_off": (
        "adapter_not_applied",
        (
            "pipeline",
            ("noise_pred = self.predict_noise_maybe_with_cfg(", 0),
            "before",
            "self.transformer.disable_adapters()",
        ),
    ),
    "images_of_step_before": ("images_of_step_before", ("pipeline", _DECODED, "before", _PAST)),
    "noise_reused": ("noise_reused", ("pipeline", _NOISE, "before", _ONE_NOISE)),
    "log_probs_summed": ("log_probs_summed", ("sde", ("log_prob.mean(", 0), "instead", "log_prob.sum(")),
    "advantages_not_centred": (
        "advantages_not_centred",
        ("advantages", ("return scores, scores", 0), "before", "scores = scores + 1.0"),
    ),
    "half_sigma": (
        "rounded_sigmas",
        ("sde", ("self.sigmas[", None), "instead", "self.sigmas.half().float()["),
    ),
}
"""By name: the cause that the doctor gives it, and the change."""

_CAPTURED = (
    'rl |= {"initial_noise": noise, "final_latents": latents, '
    '"schedule": self.scheduler.sigmas.expand(len(latents), -1)}'
)
DUMP: tuple[Change, ...] = (
    ("pipeline", _NOISE, "before", "noise = latents"),
    ("pipeline", ("result = rollout_output(", 0), "before", _CAPTURED),
    (
        "trainer",
        ('data.meta_info["multi_turn"]', 0),
        "before",
        "self.watched = dump_verl_omni(\n            os.environ['DUMP'], self.global_steps, data, self.config, "
        "capture_verl_omni(data, self.config, self.adapter)\n        )",
    ),
    (
        "trainer",
        ("from verl_omni.workers.utils.padding import", 0),
        "before",
        "from dump_log_probs import capture_verl_omni, dump_verl_omni",
    ),
)
"""The lines that the docstrings of the example name."""
