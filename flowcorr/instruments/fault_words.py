"""Meaning of each fault of log-probs that `faults` finds, and the findings that it hides. Read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of log-probs.

    Attributes:
        meaning: its explanation.
        hides: other faults whose trace it leaves as well.
        hides_advice: whether no advice on the gap's correction can hold beside it.
        proof: whether only a fault of the bookkeeping explains its trace, and no weights that diverge or are old.
    """

    meaning: str
    hides: tuple[str, ...] = ()
    hides_advice: bool = True
    proof: bool = True


FAULTS: Mapping[str, Fault] = {
    "non_finite": Fault(
        meaning="Log-probs of the engine or the trainer are not finite.", hides_advice=False, proof=False
    ),
    "summed": Fault(
        meaning="Log-probs are sums over the latent, where means are expected.",
        hides=("other_std",),
    ),
    "one_for_all": Fault(
        meaning="All samples have one log-prob, as of a mean over the batch.",
        hides=("other_order", "one_step", "shared_shift", "other_std", "few_samples"),
    ),
    "other_order": Fault(
        meaning="The trainer's log-probs are those of the engine in another order of samples or steps.",
        hides=("other_std",),
    ),
    "one_step": Fault(
        meaning="The gap lies in one step of the schedule alone, nearly the same in all samples.",
        hides=("shared_shift", "other_std"),
    ),
    "shared_shift": Fault(
        meaning="A shift of log-probs that no two densities have: with `p` the sampler's, `E[log q - log p] <= 0` "
        "(Jensen).",
        hides=("other_std",),
    ),
    "other_std": Fault(
        meaning="The steps of trainer and engine have different stds: by another noise level, sde_type or schedule."
    ),
    "few_samples": Fault(
        meaning="The gap of a few samples is far from that of the others; rounding affects all samples alike.",
        proof=False,
    ),
    "stale": Fault(
        meaning="The weights that sampled were older than the trainer's.", hides_advice=False, proof=False
    ),
}
"""By cause, in the order of `faults.FINDERS`."""
