"""Samples without a picture: their latents, or the pixels decoded from them, are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def find_broken(
    latents: Sequence[Tensor], finite_images: Tensor, *, samples_in: str, decodes_in: str
) -> dict[int, str]:
    """Reasons for samples without a picture, by their places in the batch.

    A reward would score an arbitrary image of such a sample, so the sample fails as if its reward had failed.

    Args:
        latents: `[B, ...]` tensors of the trajectories.
        finite_images: `[B]` bool, see `Rollout`.
        samples_in: key and value of the dtype that the transformer samples in, such as `rollout.dtype=float16`.
        decodes_in: likewise of the VAE, see `flowcorr.rollout.precision.decoder_dtype`.
    """
    lost = ~torch.stack([part.isfinite().flatten(1).all(1) for part in latents]).all(0)
    undecoded = ~finite_images.to(lost.device) & ~lost
    diverged = (
        f"its latents are not finite: {overflow('the weights have diverged', samples_in)}; lower actor.lr"
        f"{_other_dtype(samples_in)} in a new run"
    )
    overflowed = (
        "its latents are finite and its decoded pixels are not: "
        f"{overflow('the weights of the VAE are damaged', decodes_in)}; check the model's files"
        f"{_other_dtype(decodes_in)}"
    )
    causes = dict.fromkeys(lost.nonzero().flatten().tolist(), diverged)
    return causes | dict.fromkeys(undecoded.nonzero().flatten().tolist(), overflowed)


def overflow(fault: str, computes_in: str) -> str:
    """The reason for numbers that are not finite, in words; only float16 lacks the range for a healthy model.

    Args:
        fault: the other possible cause, in words, such as diverged weights.
        computes_in: key and value of the dtype, such as `model.dtype=float16`.
    """
    if computes_in.endswith("=float16"):
        return f"numbers overflow in {computes_in}, or {fault}"
    return f"{fault}, since numbers overflow even in {computes_in}"


def _other_dtype(computes_in: str) -> str:
    return ", or use bfloat16" if computes_in.endswith("=float16") else ""
