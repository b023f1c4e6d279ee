"""Folders of runs, as the trainer leaves them, made without training."""

import json
from pathlib import Path

import torch
from PIL import Image

from flowcorr import dumps
from flowcorr.config import load, to_yaml
from flowcorr.dumps import DumpedTerms, LoggedLoss


def write_run(folder: Path, *overrides, steps=4, scale=1.0, images=0, events=()) -> Path:
    """A run's folder, as the trainer leaves it."""
    (folder / "images").mkdir(parents=True)
    config = load("tiny_ocr_lora", list(overrides))
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    records = [{"step": 0, "eval/reward": 0.25}]
    for step in range(1, steps + 1):
        records.append(
            {
                "step": step,
                "rollout/num_elements": 320.0,
                "rollout/velocity_distance": 1.0,
                "reward/mean": scale * step / 8,
                "rollout_corr/kl": scale * 1e-3 * step,
                "rollout_corr/rollout_is_mean": None,
                "rollout_corr/rejected_ratio": 0.2 * scale,
                "rollout_corr/step_0/logprob_abs_diff": scale * 1e-4 * step,
                "rollout_corr/step_1/logprob_abs_diff": 0.0,
                "timing/rollout": 2.0,
                "timing/update": 1.0,
                "timing/step": 4.0,
            }
        )
    if steps:
        records.append({"step": steps, "eval/reward": 0.75})
    (folder / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8"
    )
    if events:
        lines = "".join(f"{json.dumps(event)}\n" for event in events)
        (folder / "events.jsonl").write_text(lines, encoding="utf-8")
    for index in range(images):
        Image.new("RGB", (8, 8)).save(folder / "images" / f"rollout_{index:06d}_00.png")
    if images:
        Image.new("RGB", (8, 8)).save(folder / "images" / "before_after.png")
    return folder


def dump(folder: Path, *, bypass=False, scale=1e-3, steps=2, before_update=None) -> None:
    """Terms of 64 samples, two steps each; their ratios are 1 for the first half."""
    draw = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        rollout = torch.randn(64, 2, generator=draw)
        old = (
            rollout
            if bypass
            else rollout + scale * torch.tensor([1.0, 3.0]) * torch.randn(64, 2, generator=draw)
        )
        update = scale * torch.randn(64, 2, generator=draw)
        update[:32] = 0
        flat = torch.ones(64, 2)
        terms = DumpedTerms(
            rollout_log_probs=rollout,
            old_log_probs=old,
            current_log_probs=old + update,
            advantages=flat[:, 0],
            rewards=flat[:, 0],
            timesteps=900 * flat,
            sigmas=0.9 * flat,
            sigmas_next=0.8 * flat,
            stds=0.5 * flat,
            step_indices=torch.tensor([0, 1]).repeat(64, 1),
            group_ids=torch.arange(64),
            policy_versions=torch.arange(64),
            num_elements=512,
            bypass=bypass,
            before_update=None if before_update is None else before_update.long(),
            current_old_kl=torch.full((64, 2), 2e-3),
        )
        dumps.save(folder / dumps.FOLDER, step, terms, LoggedLoss())
