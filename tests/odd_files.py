"""Files of dumped steps as a stranger may hand them over."""

import torch
from safetensors.torch import save_file

BATCH = 8


def good_tensors():
    """The tensors of a decoupled step with two SDE steps a sample."""
    draw = torch.Generator().manual_seed(0)
    rollout = torch.randn(BATCH, 2, generator=draw)
    return {
        "rollout_log_probs": rollout,
        "old_log_probs": rollout + 1e-3 * torch.randn(BATCH, 2, generator=draw),
        "current_log_probs": rollout + 1e-3 * torch.randn(BATCH, 2, generator=draw),
        "advantages": torch.randn(BATCH, generator=draw),
        "rewards": torch.rand(BATCH, generator=draw),
        "group_ids": torch.arange(BATCH) // 4,
        "step_indices": torch.tensor([[1, 3]]).repeat(BATCH, 1),
        "sigmas": torch.tensor([[0.9, 0.7]]).repeat(BATCH, 1),
    }


def good_metadata(step=1):
    """Its metadata."""
    return {
        "format_version": "1",
        "step": str(step),
        "mode": "decoupled",
        "loss_mode": "flow_grpo",
        "num_elements": "64",
        "clip_ratio": "0.001",
        "adv_clip_max": "5.0",
    }


def write_step(folder, step=1, *, tensors=(), metadata=(), name=None):
    """The file of a step with some of its tensors and metadata changed; None takes one away."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (name or f"step_{step:06d}.safetensors")
    held = good_tensors() | dict(tensors)
    said = good_metadata(step) | dict(metadata)
    save_file(
        {key: value.contiguous() for key, value in held.items() if value is not None},
        path,
        {key: value for key, value in said.items() if value is not None},
    )
    return path
