"""Checks of the model: its weights, their sync, and its attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor import precision
from flowcorr.instruments.doctor.exam import EXPLAINED, Exam, largest_gap
from flowcorr.instruments.doctor.findings import failed, judged, passed, skipped
from flowcorr.instruments.doctor.other_inputs import named
from flowcorr.instruments.doctor.trials import score_means
from flowcorr.instruments.gap_words import percent, two_digits
from flowcorr.questions.compared import velocity_gap
from flowcorr.rollout.base import AS_SENT, attention_name
from flowcorr.rollout.precision import MARGIN, NO_GAP, rounds_apart, trainer_quantization

# Missing share of a change of weights: up to 0.02 with all layers bound (0.08 for a random FLUX in bfloat16), 0.55 with
# half of them.
MISSING_WARN, MISSING_FAIL = 0.1, 0.25
# Of the gap that precision costs, how much may lie along a change of the weights: up to 0.1 in clean int4.
ALONG_CHANGE = 0.2
# Of the actor's own rounding error, how large may the engine's be? Clean bfloat16 gives .98 to 1.01, an attention head
# at zero 2.3, guidance 5 % stronger 1.5.
ROUNDING_FAIL = 1.5
PLAIN = ("SDPA", "TORCH_SDPA")  # names of plain attention, as engines give it


@runtime_checkable
class Describes(Protocol):
    """An engine that describes itself."""

    def describe(self) -> Mapping[str, str]:
        """Facts such as `{"attention": "FLASH_ATTN", "dtype": "bfloat16"}`."""


def check_sync(exam: Exam) -> Finding:
    trial, under = exam.trials.moved, exam.trials.moved_under
    lora = bool(exam.config.model.lora.rank)
    # An engine without any adapter is judged by `lora`. It also fits older weights, if those had no adapter either.
    candidates = ("bare", "previous", "current") if lora else ("previous", "current")
    shares = {name: trial.explained_by([under[name]]) for name in candidates}
    name, share = max(shares.items(), key=lambda item: item[1])
    when = "of one sync ago" if name == "previous" else "from before several syncs"
    stale = 0.0 if name == "bare" else share
    finding = judged(
        stale,
        EXPLAINED,
        "the engine samples with the newest weights",
        f"after a sync the engine still samples with the weights {when}",
        "check the answer of every sync, and that no request keeps an old version; set an intended lag as "
        "rollout.staleness",
        weights=name if stale > EXPLAINED else None,
    )
    if finding.level == "serious":
        return finding
    told, versions = exam.trials.moved_version, trial.rollout.policy_versions
    # An engine that samples without any adapter may say an older version truly; `lora` judges it.
    wrong = versions[versions > told if share > EXPLAINED else versions != told]
    if len(wrong):
        said = int(wrong[0])
        return failed(
            f"the newest weights are version {told}, and the engine says that version {said} sampled",
            "Rollout.policy_versions has to be the Weights.version of the sync whose weights sampled",
            sent_version=told,
            sampled_version=said,
        )
    return finding if lora else _arrival(exam, "trained weights")


def check_weights(exam: Exam) -> Finding:
    trial = exam.trials.bare
    gap, usual = trial.velocity_gap(), exam.usual_gap
    nats = trial.rollout.num_elements * float(trial.squared_distance().sum(1).mean() / 2)
    message = f"velocities differ by {percent(gap)}, a gap of {two_digits(nats)} joint nats a window"
    numbers: dict[str, Any] = {"joint_nats": nats}
    engine_dtype, actor_dtype = exam.config.rollout.dtype, exam.config.model.dtype
    if engine_dtype != actor_dtype:
        numbers |= {"rollout.dtype": engine_dtype, "model.dtype": actor_dtype}
        message += (
            f"; rollout.dtype={engine_dtype} and model.dtype={actor_dtype} round apart, which accounts for up to "
            f"{percent(usual)}"
        )
    quantization = trainer_quantization(exam.config)
    if quantization != "none":
        numbers["model.quantization"] = quantization
        message += (
            f"; model.quantization={quantization} rounds the actor's weights and not the engine's, which accounts for "
            f"up to {percent(usual)}"
        )
    side = "engine" if quantization == "none" else "trainer"
    by_length = trial.fit(trial.still)  # towards a velocity of 0
    if gap > usual and by_length.share >= EXPLAINED:
        numbers["velocity_factor"] = 1 - by_length.factor
        message += (
            f"; the engine's are {1 - by_length.factor:.4g} times the actor's, which is {percent(by_length.share)} of "
            "the gap"
        )
    off_float32 = None if gap <= NO_GAP else _gaps_to_float32(exam)
    if off_float32 is not None and off_float32[0] > ROUNDING_FAIL * off_float32[1]:
        engine, actor = off_float32
        return failed(
            f"{message}. The engine's are {percent(engine)} from the actor's in float32, and rounding takes "
            f"the actor's own only {percent(actor)} from there",
            "compare model.path, revision and variant of both stacks, and the engine's layers: rounding does not "
            "explain this gap",
            value=engine / actor,
            limit=ROUNDING_FAIL,
            **numbers,
        )
    limit = largest_gap(usual)
    coarse = gap <= limit
    remedy = _remedy(exam, coarse=coarse, side=side)
    off = trial.samples_off()
    if not coarse and 2 * len(off) <= trial.rollout.num_samples:
        numbers["samples"] = off
        message += f" in {named(off)} of {trial.rollout.num_samples} alone"
        remedy = (
            "the others agree, so the model is the same: look for what these samples alone had, such as a worker, its "
            "weights, or a place in the batch"
        )
    return judged(
        gap,
        usual,
        message,
        message if coarse else f"{message}: more than precision explains",
        remedy,
        fails_above=limit,
        **numbers,
    )


def _remedy(exam: Exam, *, coarse: bool, side: str) -> str:
    """The remedy of a gap; `coarse` if a low precision of `side`, or of both sides, explains it."""
    config = exam.config
    rounds = {config.model.dtype, config.rollout.dtype} != {"float32"} or config.actor.autocast
    if coarse and (rounds or rounds_apart(config)):
        return f"the {side}'s precision is low: train decoupled, and watch rollout_corr/exact_kl"
    if coarse:
        return (
            "both stacks compute in float32, which rounds less: compare what each allows (TF32, attention, compiled "
            "kernels), and the weights of both"
        )
    remedy = "compare model.path, revision and variant of both stacks, and the engine's quantization"
    guided = (
        exam.actor.family.distills_guidance or getattr(config.sampling, exam.actor.family.guidance_key) > 1
    )
    return remedy if guided else f"{remedy}; guidance in the engine alone has the same effect"


def _gaps_to_float32(exam: Exam) -> tuple[float, float] | None:
    """Velocity gaps of the engine and of the actor to the actor in float32, as shares of its velocity.

    None if the actor does not round, weights are coarse, or memory is short.

    Two stacks of one precision round alike, but differently. So the actor's own error measures what the engine's may
    be, on this model, these prompts and this guidance.
    """
    actor, trial = exam.actor, exam.trials.bare
    config = exam.config
    if rounds_apart(config) or config.model.dtype == "float32" or not precision.fits(actor.family, copies=1):
        return None
    rollout = replace(trial.rollout, conditioning=precision.in_float32(trial.rollout.conditioning))
    guidance = actor.guidance  # as both stacks computed with it: its rounding is no error of either
    with actor.weights.swapped(exam.trials.bare_weights.tensors), precision.actor_in_float32(actor):
        exact = score_means(actor, rollout, guidance=guidance)
    engine = velocity_gap(trial.engine_means, exact, trial.still)
    return engine, velocity_gap(trial.means, exact, trial.still)


def check_lora(exam: Exam) -> Finding:
    if not exam.config.model.lora.rank:
        return skipped("model.lora.rank=0: all weights are trained, see sync")
    return _arrival(exam, "adapter")


def _arrival(exam: Exam, what: str) -> Finding:
    """Whether new weights change the engine's steps as they change the actor's."""
    trial, without = exam.trials.moved, exam.trials.moved_under["bare"]
    move = trial.means - without
    gap, precision = trial.velocity_gap(), exam.trials.bare.velocity_gap()
    size = velocity_gap(trial.means, without, trial.still)
    # Without the gap from precision, which is there without the change too and varies by up to 25 % between trials. But
    # coarse weights round a merged adapter otherwise than the base alone, by up to 1.3 times the largest clean gap.
    rounding = max(2 * precision**2, 2 * (exam.usual_gap / MARGIN) ** 2)
    share = 1 - trial.fit(without).factor
    size = max(size, 1e-12)
    unsure = ALONG_CHANGE * precision / size
    missing = max(math.sqrt(max(gap**2 - rounding, 0.0)) / size, abs(1 - share) - unsure)
    message = f"{100 * share:.0f} % of the {what}'s effect on the actor's steps is found in the engine's"
    names = "compare the engine's layer names with the names that are sent"
    bad, lost = message, "few"
    if missing <= MISSING_FAIL:
        remedy = f"{names}: a few may be left out"
    elif trial.explained_by([without]) >= EXPLAINED:
        bad = f"the {what} has no effect in the engine: it binds to no layer, or never arrives"
        lost = "all"
        remedy = f"{names}, pass the adapter with every request, and check the answer of every sync"
        if _is_held(exam):
            bad = f"the {what} has no effect in the engine, which holds it as it was sent"
            remedy = "find out why its layers compute without it: its scale, or a request without it"
    elif share > 1 + MISSING_FAIL or trial.explained_by([without + share * move]) >= EXPLAINED:
        bad, lost = f"{message}: its scale differs", "scale"
        remedy = "apply the adapter once, scaled by model.lora.alpha / model.lora.rank"
    else:
        bad, lost = f"{message}: some layers are left out", "layers"
        remedy = (
            "find out which layers compute otherwise with what they hold: each has the tensors that were sent"
            if _is_held(exam)
            else f"{names}; fused projections need a mapping"
        )
    lost_part = lost if missing > MISSING_WARN else None
    return judged(
        missing, MISSING_WARN, message, bad, remedy, fails_above=MISSING_FAIL, arrived=share, lost=lost_part
    )


def _is_held(exam: Exam) -> bool:
    """Whether the engine knows by digests that it holds the tensors that were sent."""
    return isinstance(exam.engine, Describes) and exam.engine.describe().get("weights") == AS_SENT


def check_attention(exam: Exam) -> Finding:
    if not isinstance(exam.engine, Describes):
        return skipped("the engine does not describe itself")
    facts = exam.engine.describe()
    own = attention_name(exam.actor.weights.transformer)
    message = f"engine: {', '.join(f'{key} {value}' for key, value in facts.items())}; actor: attention {own}"
    numbers: dict[str, Any] = {
        **{f"engine_{key}": value for key, value in facts.items()},
        "actor_attention": own,
    }
    if facts.get("attention") in (own, *PLAIN):
        return passed(message, **numbers)
    remedy = "try the engine's plain attention (SDPA) and see whether the gap disappears"
    gap = exam.trials.base.velocity_gap()
    return judged(gap, exam.usual_gap, message, message, remedy, fails_above=math.inf, **numbers)
