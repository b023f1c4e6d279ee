"""Runs that dumped log-probs, made without training."""

import torch

from flowcorr import config, dumps
from flowcorr.dumps import DumpedTerms, LoggedLoss

CORRECTION = "algorithm.rollout_correction"
D = 64


def terms_of(samples=24, steps=2, *, seed=0, dtype=torch.float64, bypass=False, shift=1.0, kls=False):
    """Terms with a drift of some 1e-3 and updates of 5e-4 nats a latent element, in groups of four."""
    draw = torch.Generator().manual_seed(seed)

    def noise(scale):
        return scale * torch.randn(samples, steps, generator=draw, dtype=dtype)

    rollout = noise(1.0)
    old = rollout if bypass else rollout + noise(shift * 1e-3)
    flat = torch.ones(samples, steps, dtype=dtype)
    optional = ("old_rollout_kl", "current_old_kl", "current_rollout_kl") if kls else ()
    return DumpedTerms(
        rollout_log_probs=rollout,
        old_log_probs=old,
        current_log_probs=old + noise(5e-4),
        advantages=torch.randn(samples, generator=draw, dtype=dtype),
        rewards=torch.rand(samples, generator=draw, dtype=dtype),
        timesteps=900 * flat,
        sigmas=0.9 * flat,
        sigmas_next=0.8 * flat,
        stds=0.3 * flat + 0.1 * torch.rand(samples, steps, generator=draw, dtype=dtype),
        step_indices=torch.arange(steps).repeat(samples, 1),
        group_ids=torch.arange(samples) // 4,
        policy_versions=torch.zeros(samples, dtype=torch.int64),
        num_elements=D,
        bypass=bypass,
        **{name: noise(1e-3).square() / 2 for name in optional},
    )


def write_run(folder, parts, *overrides):
    """A run's folder with these steps."""
    folder.mkdir()
    settings = config.load("tiny_jpeg_lora", list(overrides))
    (folder / "config.yaml").write_text(config.to_yaml(settings), encoding="utf-8")
    for step, part in enumerate(parts, 1):
        dumps.save(folder / dumps.FOLDER, step, part, LoggedLoss())
    return folder
