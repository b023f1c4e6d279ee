"""Prompts, guidance and adapter of captured samples: with which of them does the replay agree?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowcorr.instruments.doctor.replayed.legs import LegName, Legs
from flowcorr.instruments.doctor.replayed.stack import Inputs, Stack
from flowcorr.instruments.doctor.replayed.verdicts import Part, Verdict

_MAX_PROMPTS = 12
_LENGTHS = (77, 128, 256, 512)
_CLOSER = 2.0  # times, at least, that a replay comes closer once its cause is undone


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """Other inputs, with which the samples may have been made.

    Attributes:
        part: which part would be wrong.
        cause: its name.
        message: what would be wrong, in words.
        remedy: what to do then.
        inputs: the other inputs; of several, each sample may have one of its own.
        whole: whether all samples would have been made so.
    """

    part: Part
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
    """What may be wrong about the inputs, as far as other inputs are known."""
    inputs = stack.captured
    others = [text for text in dict.fromkeys((*pool, inputs.negative_prompt, "")) if text is not None]
    others = others[:_MAX_PROMPTS]
    if others:
        count = len(inputs.prompts)
        yield Hypothesis(
            part="prompts",
            cause="wrong_prompt",
            message="the engine sampled with the prompts of other samples",
            remedy="compare the order of prompts, embeddings and latents in the batch; embeddings of an earlier batch "
            "may have been used",
            inputs=tuple(replace(inputs, prompts=(text,) * count) for text in others),
            whole=False,
        )
    if inputs.guidance_scale != 1:
        yield Hypothesis(
            part="guidance",
            cause="guidance_off",
            message=f"the engine sampled without guidance, where {inputs.guidance_scale:g} was asked for",
            remedy="hand guidance and the negative prompt's embeddings to the engine",
            inputs=(replace(inputs, guidance_scale=1.0),),
        )
    if inputs.guidance_scale != 1 and inputs.negative_prompt:
        yield Hypothesis(
            part="guidance",
            cause="negative_prompt",
            message="the engine sampled with an empty negative prompt",
            remedy="hand the negative prompt's embeddings to the engine",
            inputs=(replace(inputs, negative_prompt=""),),
        )
    if inputs.adapter and not stack.adapter_is_zero:
        yield Hypothesis(
            part="adapter",
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
                part="schedule",
                cause="rounded_sigmas",
                message=f"the engine took its steps with sigmas rounded to {name}",
                remedy="keep the table of sigmas in float32, and read it by step index",
                inputs=(replace(inputs, sigmas=sigmas),),
            )
        if timesteps != inputs.timesteps:
            yield Hypothesis(
                part="schedule",
                cause="rounded_timesteps",
                message=f"the engine's transformer was fed timesteps rounded to {name}",
                remedy="capture the timesteps as the transformer is fed them, and replay these in training",
                inputs=(replace(inputs, timesteps=timesteps),),
            )
    if stack.own is not None and stack.own.timesteps != inputs.timesteps:
        yield Hypothesis(
            part="schedule",
            cause="timesteps",
            message="the transformer was fed the timesteps of the model's own schedule, not the captured ones",
            remedy="make timesteps and sigmas from one schedule",
            inputs=(replace(inputs, timesteps=stack.own.timesteps),),
        )
    lengths = [length for length in _LENGTHS if length != inputs.max_sequence_length]
    yield Hypothesis(
        part="prompts",
        cause="sequence_length",
        message="the engine padded or cut prompts to another number of tokens",
        remedy="give both stacks one max_sequence_length, and capture it",
        inputs=tuple(replace(inputs, max_sequence_length=length) for length in lengths),
    )


def examine_inputs(stack: Stack, legs: Legs, pool: Sequence[str], step: int) -> list[Verdict]:
    """The verdicts on the legs, and on prompts, guidance and adapter."""
    if not legs.known:
        wanted = "latents, next_latents, sigmas and guidance_scale"
        return [
            Verdict(
                part=part,
                status="SKIP",
                step=step,
                message="cannot tell",
                remedy=f"capture {wanted}, so that steps can be replayed",
            )
            for part in ("log_probs", "prompts", "guidance", "adapter")
        ]
    scores = legs.scores(stack.captured, legs.known)
    bad = [leg for leg, score in scores.items() if bool((score > 1).any())]
    if bad:
        return _explained(stack, legs, pool, scores, bad, step)
    agree = [
        Verdict(
            part=leg,
            status="PASS",
            step=step,
            message="the replay agrees",
            evidence=f"at most {float(score.max()):.2g} limits",
            samples=tuple(score.tolist()),
        )
        for leg, score in scores.items()
    ]
    return agree + [_told_apart(stack, legs, pool, part, step) for part in ("prompts", "guidance", "adapter")]


def _explained(
    stack: Stack,
    legs: Legs,
    pool: Sequence[str],
    scores: dict[LegName, Tensor],
    bad: Sequence[LegName],
    step: int,
) -> list[Verdict]:
    """The verdicts where the replay differs: the cause, if undoing it and nothing else makes the replay agree."""
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
    agree = [
        Verdict(
            part=leg,
            status="PASS",
            step=step,
            message="the replay agrees",
            samples=tuple(scores[leg].tolist()),
        )
        for leg in scores
        if leg not in bad
    ]
    evidence = f"the replay differs by {_row(captured)} limits ({', '.join(bad)})"
    if named is None:
        differs = "the replay differs, and none of the known causes explains it"
        if full:
            messages = dict.fromkeys(one.hypothesis.message for one in full)
            differs = f"the replay differs, and several causes explain it: {'; '.join(messages)}"
        unclear = Verdict(
            part="log_probs",
            status="WARN",
            step=step,
            message=differs,
            evidence=evidence,
            remedy=_odd_samples(failing) + _more(stack),
        )
        return agree + [replace(unclear, part=leg, samples=tuple(scores[leg].tolist())) for leg in bad]
    cause = Verdict(
        part=named.hypothesis.part,
        status="FAIL",
        step=step,
        cause=named.hypothesis.cause,
        confidence="certain" if full else "likely",
        message=named.hypothesis.message,
        evidence=f"{evidence}; with this undone by {_row(named.score)}",
        samples=tuple(captured.tolist()),
        remedy=named.hypothesis.remedy,
    )
    seen = replace(cause, message=f"see {cause.part}", evidence=evidence, remedy="")
    return [*agree, *(replace(seen, part=leg, samples=tuple(scores[leg].tolist())) for leg in bad), cause]


def _row(scores: Tensor) -> str:
    return ", ".join(f"{value:.2g}" for value in scores.tolist())


def _holds(one: _Tried, failing: Tensor) -> bool:
    """Whether it holds for the samples that agree anyway, where all samples would have been made so."""
    return not one.hypothesis.whole or bool((one.score <= 1).all()) or bool(failing.all())


def _odd_samples(failing: Tensor) -> str:
    """What a few samples that differ suggest."""
    places = failing.nonzero().flatten().tolist()
    if 2 * len(places) >= len(failing):
        return ""
    named = f"sample{'s'[: len(places) != 1]} {', '.join(map(str, places))}"
    return f"look for what {named} of {len(failing)} alone had: a worker, its weights, a place in the batch; "


def _more(stack: Stack) -> str:
    missing = [line.split(";")[0].removeprefix("not captured: ") for line in stack.samples.missing()]
    return f"capture {', '.join(missing)} too" if missing else "compare both stacks step by step"


def _try(legs: Legs, hypothesis: Hypothesis, bad: Sequence[LegName]) -> _Tried:
    """The scores of the best of its inputs: for each sample, or for all where they were all made so."""
    found = torch.stack(
        [torch.stack(list(legs.scores(inputs, bad).values())).amax(0) for inputs in hypothesis.inputs]
    )
    score = found[found.amax(1).argmin()] if hypothesis.whole else found.amin(0)
    return _Tried(hypothesis=hypothesis, score=score)


_NEEDED = {
    "prompts": "prompts that the model tells apart",
    "guidance": "guidance_scale of a run with guidance",
    "adapter": "adapter and adapter_alpha, once they have been trained",
}


def _told_apart(stack: Stack, legs: Legs, pool: Sequence[str], part: Part, step: int) -> Verdict:
    """PASS where the replay agrees, and would not with this part wrong; SKIP where nothing would tell."""
    rivals = [one for one in hypotheses(stack, pool) if one.part == part and one.cause != "sequence_length"]
    rivals = [replace(one, inputs=_unlike(stack, one)) for one in rivals]
    worst = max((_effect(legs, one) for one in rivals), default=0.0)
    if worst > 1:
        return Verdict(
            part=part,
            status="PASS",
            step=step,
            message="as captured",
            evidence=f"with others the replay would differ by {worst:.2g} limits",
        )
    zero = part == "adapter" and bool(stack.samples.adapter) and stack.adapter_is_zero
    why = "no other choice would be seen in this precision" if rivals else "no other choice to compare with"
    if zero:
        why = "the adapter is still 0"
    return Verdict(
        part=part, status="SKIP", step=step, message=f"cannot tell: {why}", remedy=f"capture {_NEEDED[part]}"
    )


def _unlike(stack: Stack, hypothesis: Hypothesis) -> tuple[Inputs, ...]:
    """Of many other prompts, one that is not the captured one is enough."""
    own = set(stack.captured.prompts)
    if hypothesis.part != "prompts":
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
