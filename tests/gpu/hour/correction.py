"""The cost of the correction on the device, beside the reads that it makes and the CPU's result."""

from __future__ import annotations

import torch

from flowcorr.correction import compute_rollout_correction_and_rejection_mask
from tests.gpu.hour import meter
from tests.gpu.hour.parts import Hour

SHAPES = ((128, 3), (1152, 3), (65536, 10))
"""Of the recipes for SD3.5 and FLUX, and one that is large."""
RULES = {
    "rollout_is": "sequence",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": (0.999, 1.001),
}


def measure(hour: Hour) -> None:
    for samples, steps in SHAPES[:2] if hour.tiny else SHAPES:
        draw = torch.Generator().manual_seed(0)
        rollout = torch.randn(samples, steps, generator=draw)
        old = rollout + 3e-4 * torch.randn(samples, steps, generator=draw)
        indices = torch.arange(steps).repeat(samples, 1)
        there = [tensor.to(hour.device) for tensor in (old, rollout, indices)]

        def correct(there: list[torch.Tensor] = there, steps: int = steps) -> dict[str, float]:
            old, rollout, indices = there
            found = compute_rollout_correction_and_rejection_mask(
                old, rollout, step_indices=indices, num_steps=steps, **RULES
            )
            return found.metrics.compute()

        shape = f"({samples}, {steps})"
        milliseconds = 1e3 * meter.seconds(hour.device, correct, repeats=10)
        hour.row(f"correction and metrics of {shape}", milliseconds, unit="ms", at_most=50.0)
        expected = correct([old, rollout, indices])
        worst = max(
            abs(value - expected[name]) / (abs(expected[name]) + 1e-12) for name, value in correct().items()
        )
        hour.row(f"metrics of {shape} beside the CPU's", worst, unit="relative", at_most=1e-5)
        reads = meter.host_reads(hour.device, correct)
        if reads is not None:
            places = ", ".join(f"{place} x {count}" for place, count in reads.items())
            hour.row(f"host reads of {shape}", sum(reads.values()), at_most=1, note=places)
