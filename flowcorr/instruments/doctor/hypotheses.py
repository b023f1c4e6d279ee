"""Prompts, guidance and adapter of captured samples: with which of them does the replay agree?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcorr.instruments.doctor.findings import failed, passed, skipped, warned
from flowcorr.instruments.doctor.legs import LegName, Legs
from flowcorr.instruments.doctor.stack import Inputs, Stack
from flowcorr.instruments.finding import Finding

_MAX_PROMPTS = 12
_LENGTHS = (77, 128, 256, 512)
_CLOSER = 2.0  # times, at least, that a replay comes closer once its cause is undone


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """Other inputs, with which the samples may have been made.

    Attributes:
        check: that fails then.
        cause: its name.
        message: what would be wrong, in words.
        remedy: what to do then.
        inputs: the other inputs; of several, each sample may have one of its own.
        whole: whether all samples would have been made so.
    """

    check: str
    cause: str
    message: str
    remedy: str
    inputs: tuple[Inputs, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tried:
    hypothesis: Hypothesis
    score: Tensor
    """`[n]`, the largest over the legs that differ, of the best of its inputs."""


def hypotheses(stack: Stack, pool: Sequence[str]) -> Iterator[Hypothesis]:
    """The faults that the inputs may have, as far as other inputs are known.

    A long run has more prompts than can be tried: the samples' own come first, then those of `pool` in its order.
    """
    inputs = stack.captured
    others = list(dict.fromkeys((*inputs.prompts, *inputs.negative_prompts, "", *pool)))[:_MAX_PROMPTS]
    yield Hypothesis(
        check="embeddings",
        cause="wrong_prompt",
        message="the engine sampled with the prompts of other samples",
        remedy="compare the order of prompts, embeddings and latents in the batch; embeddings of an earlier batch "
        "may have been used",
        inputs=tuple(replace(inputs, prompts=(text,) * len(inputs.prompts)) for text in others),
        whole=False,
    )
    if inputs.guidance_scale != 1:
        yield Hypothesis(
            check="guidance",
            cause="guidance_off",
            message=f"the engine sampled without guidance, where {inputs.guidance_scale:g} was asked for",
            remedy="hand guidance and the negative prompt's embeddings to the engine",
            inputs=(replace(inputs, guidance_scale=1.0),),
        )
    if inputs.guidance_scale != 1 and any(inputs.negative_prompts):
        yield Hypothesis(
            check="guidance",
            cause="negative_prompt",
            message="the engine sampled with an empty negative prompt",
            remedy="hand the negative prompt's embeddings to the engine",
            inputs=(replace(inputs, negative_prompts=("",) * len(inputs.prompts)),),
        )
    if inputs.adapter and not stack.adapter_is_zero:
        yield Hypothesis(
            check="lora",
            cause="adapter_not_applied",
            message="the engine sampled without the adapter",
            remedy="load the adapter into the engine after each update, and switch it on",
            inputs=(replace(inputs, adapter=False),),
        )
    for dtype in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        sigmas, timesteps = (
            tuple(torch.tensor(values).to(dtype).tolist()) for values in (inputs.sigmas, inputs.timesteps)
        )
        if all(left > right for left, right in itertools.pairwise(sigmas)) and sigmas != inputs.sigmas:
            yield Hypothesis(
                check="schedule",
                cause="rounded_sigmas",
                message=f"the engine took its steps with sigmas rounded to {name}",
                remedy="keep the table of sigmas in float32, and read it by step index",
                inputs=(replace(inputs, sigmas=sigmas),),
            )
        if timesteps != inputs.timesteps:
            yield Hypothesis(
                check="schedule",
                cause="rounded_timesteps",
                message=f"the engine's transformer was fed timesteps rounded to {name}",
                remedy="capture the timesteps as the transformer is fed them, and replay these in training",
                inputs=(replace(inputs, timesteps=timesteps),),
            )
    if stack.own is not None and stack.own.timesteps != inputs.timesteps:
        yield Hypothesis(
            check="schedule",
            cause="timesteps",
            message="the transformer was fed the timesteps of the model's own schedule, not the captured ones",
            remedy="make timesteps and sigmas from one schedule",
            inputs=(replace(inputs, timesteps=stack.own.timesteps),),
        )
    lengths = [length for length in _LENGTHS if length != inputs.max_sequence_length]
    yield Hypothesis(
        check="embeddings",
        cause="sequence_length",
        message="the engine padded or cut prompts to another number of tokens",
        remedy="give both stacks one max_sequence_length, and capture it",
        inputs=tuple(replace(inputs, max_sequence_length=length) for length in lengths),
    )


def examine_inputs(stack: Stack, legs: Legs, pool: Sequence[str]) -> dict[str, Finding]:
    """The findings on the legs, and on prompts, guidance and adapter, by check."""
    if not legs.known:
        remedy = "capture latents, next_latents, sigmas and guidance_scale, so that steps can be replayed"
        return {check: skipped("cannot tell", remedy) for check in ("log_probs", *_NEEDED)}
    scores = legs.scores(stack.captured, legs.known)
    bad = [leg for leg, score in scores.items() if bool((score > 1).any())]
    if bad:
        return _explained(stack, legs, pool, scores, bad)
    agree: dict[str, Finding] = {
        leg: passed(
            f"the replay agrees; at most {float(score.max()):.2g} limits", samples=tuple(score.tolist())
        )
        for leg, score in scores.items()
    }
    return agree | {check: _told_apart(stack, legs, pool, check) for check in _NEEDED}


def _explained(
    stack: Stack,
    legs: Legs,
    pool: Sequence[str],
    scores: dict[LegName, Tensor],
    bad: Sequence[LegName],
) -> dict[str, Finding]:
    """The findings where the replay differs: the cause, if undoing it and nothing else makes the replay agree."""
    captured = torch.stack([scores[leg] for leg in bad]).amax(0)
    failing = captured > 1
    tried = [_try(legs, hypothesis, bad) for hypothesis in hypotheses(stack, pool)]
    found = {one: (one.score <= (captured / _CLOSER).clamp(max=1)) for one in tried}
    full = [one for one in tried if bool(found[one][failing].all()) and _holds(one, failing)]
    full.sort(key=lambda one: float(one.score.max()))
    by_sample = [one for one in tried if not one.hypothesis.whole and one not in full]
    partly = [one for one in by_sample if bool(found[one][failing].any())]
    causes = {one.hypothesis.cause for one in full}
    named = full[0] if len(causes) == 1 else partly[0] if not full and len(partly) == 1 else None
    limits = {leg: tuple(score.tolist()) for leg, score in scores.items()}
    findings: dict[str, Finding] = {
        leg: passed("the replay agrees", samples=limits[leg]) for leg in scores if leg not in bad
    }
    evidence = f"the replay differs by {_row(captured)} limits ({', '.join(bad)})"
    if named is None:
        differs = "the replay differs, and none of the known causes explains it"
        if full:
            messages = dict.fromkeys(one.hypothesis.message for one in full)
            differs = f"the replay differs, and several causes explain it: {'; '.join(messages)}"
        remedy = _odd_samples(failing) + _more(stack)
        return findings | {leg: warned(f"{differs}; {evidence}", remedy, samples=limits[leg]) for leg in bad}
    one = named.hypothesis
    confidence = "certain" if full else "likely"
    for leg in bad:
        findings[leg] = failed(
            f"see {one.check}; {evidence}", "", cause=one.cause, confidence=confidence, samples=limits[leg]
        )
    findings[one.check] = failed(
        f"{one.message}; {evidence}; with this undone by {_row(named.score)}",
        one.remedy,
        cause=one.cause,
        confidence=confidence,
        samples=tuple(captured.tolist()),
    )
    return findings


def _row(scores: Tensor) -> str:
    return ", ".join(f"{value:.2g}" for value in scores.tolist())


def _holds(one: _Tried, failing: Tensor) -> bool:
    """Whether a hypothesis about all samples also holds for the samples that agree without it."""
    return not one.hypothesis.whole or bool((one.score <= 1).all()) or bool(failing.all())


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


def _try(legs: Legs, hypothesis: Hypothesis, bad: Sequence[LegName]) -> _Tried:
    """The scores with a hypothesis's best inputs: the same for all samples if it is about all, else by sample."""
    found = torch.stack(
        [torch.stack(list(legs.scores(inputs, bad).values())).amax(0) for inputs in hypothesis.inputs]
    )
    score = found[found.amax(1).argmin()] if hypothesis.whole else found.amin(0)
    return _Tried(hypothesis=hypothesis, score=score)


_NEEDED = {
    "embeddings": "prompts that the model tells apart",
    "guidance": "guidance_scale of a run with guidance",
    "lora": "adapter and adapter_alpha, once they have been trained",
}


def _told_apart(stack: Stack, legs: Legs, pool: Sequence[str], check: str) -> Finding:
    """Healthy where the replay agrees, and would not with this input wrong; a note where nothing would tell."""
    rivals = [one for one in hypotheses(stack, pool) if one.check == check and one.cause != "sequence_length"]
    rivals = [replace(one, inputs=_unlike(stack, one)) for one in rivals]
    worst = max((_effect(legs, one) for one in rivals), default=0.0)
    if worst > 1:
        return passed(f"as captured; with others the replay would differ by {worst:.2g} limits")
    why = "no other choice would be seen in this precision" if rivals else "no other choice to compare with"
    untrained = check == "lora" and bool(stack.samples.adapter) and stack.adapter_is_zero
    if untrained:
        why = "the adapter is still 0"
    return skipped(
        f"cannot tell: {why}", f"capture {_NEEDED[check]}", adapter_is_zero=True if untrained else None
    )


def _unlike(stack: Stack, hypothesis: Hypothesis) -> tuple[Inputs, ...]:
    """Inputs that differ from the captured ones; of many other prompts, one is enough."""
    own = set(stack.captured.prompts)
    if hypothesis.check != "embeddings":
        return hypothesis.inputs
    count = len(stack.captured.prompts)
    rolled = stack.captured.prompts[1:] + stack.captured.prompts[:1]
    if len(own) > 1:
        return (replace(stack.captured, prompts=rolled),)
    others = [one for one in hypothesis.inputs if one.prompts != stack.captured.prompts]
    return tuple(others[:1]) or (replace(stack.captured, prompts=("",) * count),)


def _effect(legs: Legs, hypothesis: Hypothesis) -> float:
    (inputs, *_) = hypothesis.inputs
    return max(float(score.max()) for score in legs.scores(inputs, legs.known).values())
