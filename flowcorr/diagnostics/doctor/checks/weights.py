"""Checks of the model itself: its weights, how new ones arrive, and its attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from flowcorr.diagnostics.doctor.exam import EXPLAINED, Exam, largest_gap
from flowcorr.diagnostics.doctor.findings import Finding, judged, passed, skipped
from flowcorr.diagnostics.doctor.trials import velocity_gap
from flowcorr.rollout.base import attention_name

# Of the move: up to 0.02 if all layers are bound (0.08 for a random FLUX in bfloat16), 0.55 for half of them.
MISSING_WARN, MISSING_FAIL = 0.1, 0.25


@runtime_checkable
class Describes(Protocol):
    """An engine that can say what it computes with."""

    def describe(self) -> Mapping[str, str]:
        """Plain facts such as `{"attention": "FLASH_ATTN", "dtype": "bfloat16"}`."""


def check_sync(exam: Exam) -> Finding:
    """Whether the engine has the newest weights, or ones from before."""
    trial, under = exam.trials.moved, exam.trials.moved_under
    lora = bool(exam.config.model.lora.rank)
    # With nothing of the adapter in it, the engine is left to `lora`, which ties with the weights from before
    # where these have none either.
    candidates = ("bare", "previous", "current") if lora else ("previous", "current")
    shares = {name: trial.explained_by([under[name]]) for name in candidates}
    name, share = max(shares.items(), key=lambda item: item[1])
    when = "of one sync ago" if name == "previous" else "from before several syncs"
    finding = judged(
        0.0 if name == "bare" else share,
        EXPLAINED,
        "the newest weights sample",
        f"after a sync the engine still samples with the weights {when}",
        "check the answer of every sync, and that no request keeps an old version; intended lag belongs into "
        "rollout.staleness",
    )
    return finding if lora or finding.status == "FAIL" else _arrival(exam, "trained weights")


def check_weights(exam: Exam) -> Finding:
    """Whether both models are the same, by the gap that precision leaves."""
    trial = exam.trials.bare
    gap, usual = trial.velocity_gap(), exam.usual_gap
    kl = float(trial.squared_distance().mean() / 2)
    message = f"velocities differ by {100 * gap:.2g} %, an exact KL of {kl:.2g} nats a latent element a step"
    limit = largest_gap(usual)
    coarse = gap <= limit
    return judged(
        gap,
        usual,
        message,
        message if coarse else f"{message}: more than precision explains",
        "a coarse engine: train decoupled, and watch rollout_corr/exact_kl"
        if coarse
        else "compare model.path, revision and variant of both stacks, and the engine's quantization; guidance that "
        "only the engine applies looks the same",
        fails_above=limit,
    )


def check_lora(exam: Exam) -> Finding:
    """Whether the adapter acts in the engine as it does in the actor."""
    if not exam.config.model.lora.rank:
        return skipped("model.lora.rank=0: all weights are trained, see sync")
    return _arrival(exam, "adapter")


def _arrival(exam: Exam, what: str) -> Finding:
    """Whether new weights move the engine's steps as they move the actor's."""
    trial, without = exam.trials.moved, exam.trials.moved_under["bare"]
    move = trial.means - without
    gap, precision = trial.velocity_gap(), exam.trials.bare.velocity_gap()
    size = velocity_gap(trial.means, without, trial.still)
    # What precision costs without the move is not the move's fault; it varies by some 10 % between trials.
    missing = math.sqrt(max(gap**2 - 1.5 * precision**2, 0.0)) / max(size, 1e-12)
    share = 1 - trial.fit(without).factor
    message = f"{100 * share:.0f} % of what the {what} changes in the actor's steps arrives in the engine"
    names = "compare the names of the engine's layers with those that are sent"
    bad = message
    if missing <= MISSING_FAIL:
        remedy = f"{names}: a few may be left out"
    elif trial.explained_by([without]) >= EXPLAINED:
        bad = f"nothing of the {what} acts in the engine: it binds to no layer, or never arrives"
        remedy = f"{names}, pass the adapter with every request, and check the answer of every sync"
    elif share > 1 + MISSING_FAIL or trial.explained_by([without + share * move]) >= EXPLAINED:
        bad = f"{message}: its scale differs"
        remedy = "apply the adapter once, scaled by model.lora.alpha / model.lora.rank"
    else:
        bad = f"{message}: some layers are left out"
        remedy = f"{names}; fused projections need a mapping"
    return judged(missing, MISSING_WARN, message, bad, remedy, fails_above=MISSING_FAIL)


def check_attention(exam: Exam) -> Finding:
    """Which attention each side uses, where the gap is large."""
    if not isinstance(exam.engine, Describes):
        return skipped("the engine does not describe itself")
    facts = exam.engine.describe()
    own = attention_name(exam.actor.weights.transformer)
    message = f"engine: {', '.join(f'{key} {value}' for key, value in facts.items())}; actor: attention {own}"
    if facts.get("attention") == own:
        return passed(message)
    remedy = "try the engine's plain attention (SDPA) to see whether the gap goes"
    gap = exam.trials.base.velocity_gap()
    return judged(gap, exam.usual_gap, message, message, remedy, fails_above=math.inf)
