"""Dumps of another trainer, drawn at random."""

import torch

import flowcorr

D = 4096


def draw_steps(folder, *, steps=3, r=0.02, seed=0, without=(), **changes):
    """Steps of 32 samples whose recomputed log-probs are off by rounding of size `r`; `without` fields are left out."""
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    for step in range(1, steps + 1):
        rollout = normal(32, 2) / 100
        old = rollout - r**2 / 2 + r / D**0.5 * normal(32, 2)
        given = {
            "rollout_log_probs": rollout,
            "old_log_probs": old,
            "current_log_probs": old + 1e-5 * normal(32, 2),
            "advantages": normal(32),
            "rewards": torch.arange(32) % 2,
            "group_ids": [f"prompt {sample // 4}" for sample in range(32)],
            "step_indices": [1, 3],
            "sigmas": [0.9, 0.7],
            "policy_versions": [step] * 32,
            "version": step,
            "num_elements": D,
            "clip_ratio": 1e-4,
        }
        given |= changes
        flowcorr.dump(folder, step, **{name: value for name, value in given.items() if name not in without})
    return folder
