"""Which inputs explain captured samples: those with which the replay agrees, where no others make it agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.candidates import Tried, clearly_best, search
from flowcorr.instruments.doctor.checks import CHECK_OF
from flowcorr.instruments.doctor.findings import failed, passed, skipped, warned
from flowcorr.instruments.doctor.hypotheses import Hypothesis, hypotheses
from flowcorr.instruments.doctor.legs import LegName, Legs
from flowcorr.instruments.doctor.stack import Inputs, Stack

_EXACT = 1000.0  # times that a replay comes closer, where nothing but its cause brings it there
_CLOSER = 2.0  # times, at least, that a replay comes closer once its cause is undone
# Where each sample has the best of many inputs: in a coarse precision, chance brings one of them twice as close.
_CLOSER_BY_SAMPLE = 10.0


def examine_inputs(legs: Legs, pool: Sequence[str]) -> dict[str, Finding]:
    """The findings on the legs, and on prompts, guidance and adapter, by check."""
    if not legs.known:
        remedy = "capture latents, next_latents, sigmas and guidance_scale, so that steps can be replayed"
        return {check: skipped("cannot tell", remedy) for check in ("log_probs", *_NEEDED)}
    scores = legs.scores(legs.stack.captured, legs.known)
    bad = [leg for leg, score in scores.items() if bool((score > 1).any())]
    if bad:
        return _explained(legs, pool, scores, bad)
    agree: dict[str, Finding] = {
        leg: passed(
            f"the replay agrees; at most {float(score.max()):.2g} limits", samples=tuple(score.tolist())
        )
        for leg, score in scores.items()
    }
    return agree | {check: _told_apart(legs, pool, check) for check in _NEEDED}


def _explained(
    legs: Legs,
    pool: Sequence[str],
    scores: dict[LegName, Tensor],
    bad: Sequence[LegName],
) -> dict[str, Finding]:
    """The findings where the replay differs: the cause, if undoing it and nothing else makes the replay agree."""
    captured = torch.stack([scores[leg] for leg in bad]).amax(0)
    failing = captured > 1
    tried = _tried(legs, pool, captured, bad)
    full = [one for one in tried if one.explains]
    by_sample = [one for one in tried if not one.candidate.whole and not one.explains]
    partly = [one for one in by_sample if bool(_agrees(one.candidate, one.score, captured)[failing].any())]
    named = clearly_best(tried)
    if not full and len(partly) == 1:
        named = partly[0]
    limits = {leg: tuple(score.tolist()) for leg, score in scores.items()}
    findings: dict[str, Finding] = {
        leg: passed("the replay agrees", samples=limits[leg]) for leg in scores if leg not in bad
    }
    evidence = f"the replay differs by {_row(captured)} limits ({', '.join(bad)})"
    if named is None:
        differs = "the replay differs, and none of the known causes explains it"
        if full:
            messages = {one.candidate.cause: one.candidate.message for one in reversed(full)}.values()
            differs = f"the replay differs, and several causes explain it: {'; '.join(messages)}"
        if bad == ["log_probs"] and (axis := legs.reordered):
            findings["log_probs"] = failed(
                f"the log-probs are those of other {axis}; {evidence}",
                "stack log-probs and latents in one order",
                cause="log_probs_order",
                samples=limits["log_probs"],
            )
            return findings
        rounded = _rounded(legs.stack)
        if not full and rounded:
            dtype = legs.stack.samples.dtype
            differs = f"the replay differs by no more than {rounded} rounds; dtype={dtype} was captured"
        remedy = (
            f"capture the dtype in which the transformer computed, under autocast {rounded}; "
            if rounded
            else ""
        )
        remedy += _odd_samples(failing) + _more(legs.stack)
        return findings | {leg: warned(f"{differs}; {evidence}", remedy, samples=limits[leg]) for leg in bad}
    one, check = named.candidate, CHECK_OF[named.candidate.cause]
    confidence = "certain" if full else "likely"
    for leg in bad:
        findings[leg] = failed(
            f"see {check}; {evidence}", "", cause=one.cause, confidence=confidence, samples=limits[leg]
        )
    findings[check] = failed(
        f"the engine computed {one.message}; {evidence}; with this undone by {_row(named.score)}",
        one.remedy,
        cause=one.cause,
        confidence=confidence,
        samples=tuple(captured.tolist()),
        **one.numbers,
    )
    return findings


def _tried(legs: Legs, pool: Sequence[str], captured: Tensor, bad: Sequence[LegName]) -> list[Tried[Inputs]]:
    """All hypotheses, those that explain the gap of all samples first, the closest of them first."""
    failing, worst = captured > 1, captured.argsort(descending=True).tolist()
    # Most hypotheses about all samples are wrong, and each try costs a replay.
    worst_one, worst_two = (legs.of_samples(worst[:count]) for count in (1, 2))

    def attempt(candidate: Hypothesis) -> Tried[Inputs]:
        best, score = _best_inputs(legs, worst_one, candidate, bad)
        agrees = bool(_agrees(best, score, captured)[failing].all())
        return Tried(
            candidate=best,
            score=score,
            left=float(score.max()),
            explains=agrees and _holds(legs, best, score, bad, failing),
            exact=bool((captured > _EXACT * score.clamp(min=1))[failing].all()),
        )

    return search(hypotheses(legs, pool), attempt, lambda inputs: worst_two.residuals(inputs, bad))


def _agrees(candidate: Hypothesis, score: Tensor, captured: Tensor) -> Tensor:
    """`[n]` bool, whether the replay agrees with a hypothesis undone, and comes closer by that."""
    closer = _CLOSER if candidate.whole else _CLOSER_BY_SAMPLE
    return score <= (captured / closer).clamp(max=1)


def examine_trainer(stack: Stack, log_probs: Tensor, pool: Sequence[str]) -> Finding:
    """The finding on the trainer's log-probs `[n, T]` of the captured samples."""
    legs = Legs(stack, log_probs=log_probs)
    if not legs.known:
        return skipped("cannot tell", f"capture {_NEEDED['transition']}")
    scores = legs.scores(legs.stack.captured, legs.known)["log_probs"]
    limits, evidence = (
        tuple(scores.tolist()),
        f"its log-probs differ from the replay by {_row(scores)} limits",
    )
    if bool((scores <= 1).all()):
        return passed(
            f"the trainer scores as the replay does; at most {max(limits):.2g} limits", samples=limits
        )
    # The trainer scores the window alone, where no guidance in its steps is no guidance at all.
    tried = [
        one
        for one in _tried(legs, pool, scores, legs.known)
        if not any(set(stack.steps) <= set(ran.unguided) for ran in one.candidate.inputs)
    ]
    named = clearly_best(tried)
    if named is not None:
        return failed(
            f"the trainer computed {named.candidate.message}; {evidence}; with this undone by {_row(named.score)}",
            "give the trainer the engine's inputs: this gap is in its own log-probs, which no correction repairs",
            cause=named.candidate.cause,
            side="trainer",
            samples=limits,
            **named.candidate.numbers,
        )
    why = "; ".join(one.candidate.message for one in tried if one.explains) or "no known cause explains it"
    return skipped(
        f"cannot tell: {evidence}; {why}",
        "its weights may be newer than the captured adapter, or its precision another",
        samples=limits,
    )


def _rounded(stack: Stack) -> str:
    """The dtype whose rounding explains all legs, where a finer one was captured; else empty."""
    for name in ("float16", "bfloat16"):
        if stack.gaps_in(name) > stack.gaps_in(stack.dtype):
            legs = Legs(stack, name)
            scores = legs.scores(legs.stack.captured, legs.known).values()
            if all(bool((score <= 1).all()) for score in scores):
                return name
    return ""


def _row(scores: Tensor) -> str:
    return ", ".join(f"{value:.2g}" for value in scores.tolist())


def _holds(legs: Legs, candidate: Hypothesis, score: Tensor, bad: Sequence[LegName], failing: Tensor) -> bool:
    """Whether a hypothesis about all samples also holds for samples and legs that agree without it."""
    if not candidate.whole:
        return True
    if not bool((score <= 1).all()) and not bool(failing.all()):
        return False
    good = [leg for leg in legs.known if leg not in bad]
    (inputs,) = candidate.inputs
    return all(bool((gap <= 1).all()) for gap in legs.scores(inputs, good).values())


def _odd_samples(failing: Tensor) -> str:
    """A hint where only a few samples differ; else empty."""
    places = failing.nonzero().flatten().tolist()
    if 2 * len(places) >= len(failing):
        return ""
    named = f"sample{'s'[: len(places) != 1]} {', '.join(map(str, places))}"
    return f"look for what {named} of {len(failing)} alone had: a worker, its weights, a place in the batch; "


def _more(stack: Stack) -> str:
    missing = [line.split(";")[0].removeprefix("not captured: ") for line in stack.samples.missing()]
    return f"capture {', '.join(missing)} too" if missing else "compare both stacks step by step"


def _best_inputs(
    legs: Legs, worst_one: Legs, candidate: Hypothesis, bad: Sequence[LegName]
) -> tuple[Hypothesis, Tensor]:
    """A hypothesis with its best inputs, and their scores.

    The inputs are the same for all samples if it is about all, else the best by sample. A hypothesis about all samples
    is tried on the worst one first.
    """
    if not candidate.whole:
        scores = torch.stack([_score(legs, inputs, bad) for inputs in candidate.inputs])
        return candidate, scores.amin(0)
    near = {inputs: _score(worst_one, inputs, bad) for inputs in candidate.inputs}
    best = min(near, key=lambda inputs: float(near[inputs]))
    candidate = replace(candidate, inputs=(best,))
    if float(near[best]) > 1:
        return candidate, near[best].expand(legs.num_samples)
    return candidate, _score(legs, best, bad)


def _score(legs: Legs, inputs: Inputs, bad: Sequence[LegName]) -> Tensor:
    """`[n]`, the largest over these legs."""
    return torch.stack(list(legs.scores(inputs, bad).values())).amax(0)


_TELLING = {"wrong_prompt", "guidance_off", "negative_prompt", "adapter_not_applied", "sde_type"}
_NEEDED = {
    "embeddings": "prompts that the model tells apart",
    "guidance": "guidance_scale of a run with guidance",
    "lora": "adapter and adapter_alpha, once they have been trained",
    "transition": "latents, next_latents, log_probs, sigmas and noise_level",
}


def _told_apart(legs: Legs, pool: Sequence[str], check: str) -> Finding:
    """Healthy where the replay agrees, and would not with this input wrong; a note where nothing would tell."""
    rivals = [
        replace(one, inputs=_unlike(legs.stack.captured, one))
        for one in hypotheses(legs, pool)
        if CHECK_OF[one.cause] == check and one.inputs and one.cause in _TELLING
    ]
    worst = max((_effect(legs, one) for one in rivals), default=0.0)
    if worst > 1:
        return passed(f"as captured; with others the replay would differ by {worst:.2g} limits")
    why = "no other choice would be seen in this precision" if rivals else "no other choice to compare with"
    untrained = check == "lora" and bool(legs.stack.samples.adapter) and legs.stack.adapter_is_zero
    if untrained:
        why = "the adapter is still 0"
    return skipped(
        f"cannot tell: {why}", f"capture {_NEEDED[check]}", adapter_is_zero=True if untrained else None
    )


def _unlike(captured: Inputs, hypothesis: Hypothesis) -> tuple[Inputs, ...]:
    """Inputs that differ from the captured ones; of many other prompts, one is enough."""
    if hypothesis.cause != "wrong_prompt":
        return hypothesis.inputs
    prompts = captured.prompts
    if len({*prompts}) > 1:
        return (replace(captured, prompts=prompts[1:] + prompts[:1]),)
    others = [one for one in hypothesis.inputs if one.prompts != prompts]
    return tuple(others[:1]) or (replace(captured, prompts=("",) * len(prompts)),)


def _effect(legs: Legs, hypothesis: Hypothesis) -> float:
    (inputs, *_) = hypothesis.inputs
    return max(float(score.max()) for score in legs.scores(inputs, legs.known).values())
