"""What the faults of log-probs mean that `faults` finds."""

from __future__ import annotations

from collections.abc import Mapping

FAULTS: Mapping[str, str] = {
    "non_finite": "Log-probs of the engine or the trainer are not finite.",
    "summed": "Log-probs are sums over the latent, where means are expected.",
    "other_order": "The trainer's log-probs are those of the engine in another order of samples or steps.",
    "one_step": "The gap lies in one step of the schedule alone, nearly the same in all samples.",
    "shared_shift": "A shift of log-probs that no two densities have: with `p` the sampler's, "
    "`E[log q - log p] <= 0` (Jensen).",
    "other_std": "The steps of trainer and engine have different stds: by another noise level, sde_type or schedule.",
    "few_samples": "The gap of a few samples is far from that of the others; rounding affects all samples alike.",
    "stale": "The weights that sampled were older than the trainer's.",
}
"""By cause, in the order of `faults.RULES`."""
