"""The faults that the inputs of captured samples may have: prompts, guidance, adapter, steps and schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch

from flowcorr import sde
from flowcorr.dumps.replay import SDE_TYPES
from flowcorr.instruments.doctor.candidates import Candidate, Number
from flowcorr.instruments.doctor.legs import Legs
from flowcorr.instruments.doctor.mistakes import OTHER_TIMESTEPS
from flowcorr.instruments.doctor.shifts import (
    SHIFTS,
    own_shift,
    schedule,
    spacing_of,
    with_shift,
)
from flowcorr.instruments.doctor.stack import OTHER_REFERENCES, Inputs, Stack

_MAX_PROMPTS = 12
_LENGTHS = (77, 128, 256, 512)
_HIGHEST_GUIDANCE = 50.0
# Times that a noise level is another one, at most: the replay's limits grow with its stds' inverse squares, so that a
# level near 0 explains every gap of a coarse precision.
_LEVELS = 4.0
_UNGUIDED_STEPS = 3  # at either end of the schedule
_MAX_TARGETS = 12
_NEARLY_ONE = 1 - 2.0**-8  # as `sde.transition` has it, where steps are not tiny


Hypothesis = Candidate[Inputs]


def hypotheses(legs: Legs, pool: Sequence[str]) -> Iterator[Hypothesis]:
    """The faults that the inputs may have, as far as other inputs are known; each inputs once.

    A long run has more prompts than can be tried: the samples' own come first, then those of `pool` in its order.
    """
    stack, seen = legs.stack, {legs.stack.captured}
    families = (
        _about_prompts(stack, pool),
        _about_guidance(stack, pool),
        _about_adapter(stack),
        _about_steps(legs),
        _about_schedule(stack),
    )
    for hypothesis in itertools.chain(*families):
        fresh = tuple(one for one in dict.fromkeys(hypothesis.inputs) if one not in seen)
        if fresh or hypothesis.number is not None:
            seen.update(fresh if hypothesis.whole else ())
            yield replace(hypothesis, inputs=fresh)


def _other_texts(stack: Stack, pool: Sequence[str]) -> list[str]:
    inputs = stack.captured
    return list(dict.fromkeys((*inputs.prompts, *inputs.negative_prompts, "", *pool)))[:_MAX_PROMPTS]


def _about_prompts(stack: Stack, pool: Sequence[str]) -> Iterator[Hypothesis]:
    inputs = stack.captured
    texts = [(text,) * len(inputs.prompts) for text in _other_texts(stack, pool)]
    yield Candidate(
        cause="wrong_prompt",
        message="with the prompts of other samples",
        remedy="compare the order of prompts, embeddings and latents in the batch; embeddings of an earlier batch "
        "may have been used",
        inputs=tuple(replace(inputs, prompts=prompts) for prompts in texts),
        whole=False,
    )
    yield Candidate(
        cause="wrong_prompt",
        message="with the pooled embeddings of other samples",
        remedy="keep the embeddings of all text encoders in one order",
        inputs=tuple(replace(inputs, pooled_prompts=prompts) for prompts in texts),
        whole=False,
    )
    for name in OTHER_REFERENCES if stack.samples.references is not None else ():
        yield Candidate(
            cause="references",
            message=f"with the reference images {name}",
            remedy="hand each sample its own reference images, as they were captured: RGB, upright, in one order",
            inputs=(replace(inputs, references=name),),
        )
    lengths = [length for length in _LENGTHS if length != inputs.max_sequence_length]
    yield Candidate(
        cause="sequence_length",
        message="with prompts padded or cut to another number of tokens",
        remedy="give both stacks one max_sequence_length, and capture it",
        inputs=tuple(replace(inputs, max_sequence_length=length) for length in lengths),
    )
    yield Candidate(
        cause="sequence_length",
        message="with the embeddings of all text encoders together cut to max_sequence_length tokens",
        remedy="pad them to the length of all text encoders together, such as 77 more than the long one's",
        inputs=(replace(inputs, embeddings_cut=True),),
    )


def _about_guidance(stack: Stack, pool: Sequence[str]) -> Iterator[Hypothesis]:
    inputs, asked = stack.captured, stack.captured.guidance_scale
    to_engine = "hand guidance and the negative prompt's embeddings to the engine"
    distilled = stack.family.distills_guidance
    if asked != 1:
        yield Candidate(
            cause="guidance_off",
            message=f"without guidance, where {asked:g} was captured",
            remedy=to_engine,
            inputs=(replace(inputs, guidance_scale=1.0),),
            about="guidance_scale",
        )
    if asked != 1 or distilled:
        yield Candidate(
            cause="guidance_scale",
            message=f"with guidance {{value:.4g}}, where {asked:g} was captured",
            remedy="hand one guidance_scale to both stacks, and capture that of the engine",
            about="guidance_scale",
            number=Number(
                inputs=lambda scale: replace(inputs, guidance_scale=scale),
                starts=tuple(dict.fromkeys((asked, 2.0, 4.5, 7.0))),
                low=0.0,
                high=_HIGHEST_GUIDANCE,
            ),
        )
    if asked == 1 or distilled:
        return
    total = len(inputs.timesteps)
    for count in range(1, min(_UNGUIDED_STEPS, total - 1) + 1):
        for where, places in (("first", range(count)), ("last", range(total - count, total))):
            yield Candidate(
                cause="guidance_steps",
                message=f"without guidance in the {where} {count} steps",
                remedy="guide all steps, or replay in training as the engine samples",
                inputs=(replace(inputs, unguided=tuple(places)),),
            )
    yield Candidate(
        cause="guidance_swapped",
        message="with the two halves of guidance exchanged, away from the prompt",
        remedy="take the halves of the batch in the order in which they were put together: the velocity is that of the "
        "negative prompt, plus the scale times what the prompt adds",
        inputs=(replace(inputs, swapped=True),),
    )
    yield Candidate(
        cause="guidance_rescaled",
        message="with guidance_rescale {value:.4g}: the guided velocity rescaled to the std under the prompt alone",
        remedy="set guidance_rescale to 0 in the engine",
        number=Number(
            inputs=lambda share: replace(inputs, guidance_rescale=share),
            starts=(0.3, 0.7),
            low=1e-3,
            high=1.0,
        ),
    )
    count = len(inputs.prompts)
    others = {
        "an empty negative prompt": replace(inputs, negative_prompts=("",) * count),
        "zeros for the negative prompt's embeddings": replace(inputs, negative_zeros=True),
        **{
            f"the negative prompt {text!r}": replace(inputs, negative_prompts=(text,) * count)
            for text in _other_texts(stack, pool)
        },
    }
    for name, other in others.items():
        yield Candidate(
            cause="negative_prompt",
            message=f"with {name}",
            remedy="hand the negative prompt's embeddings to the engine",
            inputs=(other,),
        )


def _about_adapter(stack: Stack) -> Iterator[Hypothesis]:
    inputs = stack.captured
    if not inputs.adapter or stack.adapter_is_zero:
        return
    yield Candidate(
        cause="adapter_not_applied",
        message="without the adapter",
        remedy="load the adapter into the engine after each update, and switch it on",
        inputs=(replace(inputs, adapter=0.0),),
        about="adapter",
    )
    scale = "apply the adapter once, scaled by lora_alpha / rank, and capture that lora_alpha"
    yield Candidate(
        cause="adapter_scale",
        message="with the adapter applied twice",
        remedy=scale,
        inputs=(replace(inputs, adapter=2.0),),
        about="adapter",
    )
    targets = stack.adapter_targets
    for target in targets[:_MAX_TARGETS] if len(targets) > 1 else ():
        yield Candidate(
            cause="adapter_partial",
            message=f"without the adapter in the layers {target}",
            remedy="compare the engine's layer names with the names that are sent; fused projections need a mapping",
            inputs=(replace(inputs, unadapted=target),),
        )
    alpha = stack.samples.adapter_alpha
    assert alpha is not None, "`ReplaySamples` has checked it"
    yield Candidate(
        cause="adapter_scale",
        message=f"with {{value:.4g}} times the strength of the adapter that adapter_alpha={alpha:g} gives",
        remedy=scale,
        about="adapter",
        number=Number(
            inputs=lambda times: replace(inputs, adapter=times), starts=(1.0, 0.5), low=0.0, high=64.0
        ),
    )


def _about_steps(legs: Legs) -> Iterator[Hypothesis]:
    """The initial noise, the place of the window, and the transition of its steps, which moves no leg outside it."""
    stack, inputs = legs.stack, legs.stack.captured
    yield Candidate(
        cause="initial_noise_scale",
        message="from {value:.4g} times the captured initial noise",
        remedy="begin at standard normal noise, which the scheduler of a flow does not scale, and capture it",
        number=Number(
            inputs=lambda scale: replace(inputs, initial_scale=scale),
            starts=(1.0, 2.0, 0.5),
            low=0.01,
            high=1000.0,
        ),
    )
    for shift, where in ((-1, "earlier"), (1, "later")):
        if stack.steps[0] + shift >= 0 and stack.steps[-1] + shift < len(inputs.timesteps):
            yield Candidate(
                cause="step_indices",
                message=f"with its window one step {where} than step_indices says",
                remedy="count the steps of the schedule from 0, and capture those that have noise",
                inputs=(replace(inputs, shift=shift),),
            )
    if legs.window is None:
        return
    yield Candidate(
        cause="noise_outside",
        message="with noise in a step outside the window, as the window's steps have it",
        remedy="draw noise in the steps of the window alone, or train all steps that have noise: no log-prob sees it",
        inputs=(replace(inputs, noise_outside=True),),
    )
    level, sigmas = inputs.noise_level, inputs.sigmas
    assert level is not None, "`known` says so"
    for kind in SDE_TYPES:
        to_zero = kind == "cps" and (level > 1 or not sigmas[stack.steps[-1] + 1] > 0)
        if not to_zero:
            yield Candidate(
                cause="sde_type",
                message=f"with sde_type {kind}, where {inputs.sde_type} was captured",
                remedy="give both stacks one sde_type, and capture that of the engine",
                inputs=(replace(inputs, sde_type=cast(sde.SdeType, kind)),),
            )
    highest = min(_LEVELS * level, 1.0) if inputs.sde_type == "cps" else _LEVELS * level
    spread = float(legs.window.square.mean().sqrt())  # 1 where the stds of the steps are right
    told = legs.convention is not None or stack.samples.log_probs is not None
    yield Candidate(
        cause="noise_level",
        message=f"with noise level {{value:.4g}}, where {level:g} was captured"
        + ("" if told else "; or its step noise is too large by their ratio, which log_probs would tell"),
        remedy="give both stacks one noise_level, and capture that of the engine",
        number=Number(
            inputs=lambda other: replace(inputs, noise_level=other),
            starts=(level, min(max(level / _LEVELS, level * spread), highest)),
            low=level / _LEVELS,
            high=highest,
        ),
    )
    if inputs.sde_type == "sde" and stack.steps[0] == 0 and sigmas[0] > _NEARLY_ONE:
        yield Candidate(
            cause="sigma_max",
            message="with 1 - {value:.4g} in place of the first sigma, 1, where the replay takes the second "
            f"sigma, {sigmas[1]:.4g}",
            remedy="take the second sigma there, as flow_grpo does, in both stacks",
            number=Number(
                inputs=lambda rest: replace(inputs, sigma_max=1 - rest),  # of which stds are a power
                starts=tuple(0.1 / 2**halving for halving in range(8)),
                low=1e-6,
                high=0.5,
            ),
        )


def _about_schedule(stack: Stack) -> Iterator[Hypothesis]:
    inputs = stack.captured
    for dtype in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        sigmas, timesteps = (
            tuple(torch.tensor(values).to(dtype).tolist()) for values in (inputs.sigmas, inputs.timesteps)
        )
        if all(left > right for left, right in itertools.pairwise(sigmas)):
            yield Candidate(
                cause="rounded_sigmas",
                message=f"with sigmas rounded to {name}",
                remedy="keep the table of sigmas in float32, and read it by step index",
                inputs=(replace(inputs, sigmas=sigmas),),
            )
        yield Candidate(
            cause="rounded_timesteps",
            message=f"with timesteps rounded to {name}",
            remedy="capture the timesteps as the transformer is fed them, and replay these in training",
            inputs=(replace(inputs, timesteps=timesteps),),
        )
    if stack.own is not None:
        yield Candidate(
            cause="timesteps",
            message="with the timesteps of the model's own schedule, not the captured ones",
            remedy="make timesteps and sigmas from one schedule",
            inputs=(replace(inputs, timesteps=stack.own.timesteps),),
            about="schedule",
        )
    yield from _of_other_lengths(stack)
    times = inputs.timesteps
    for name, others in {
        **{name: tuple(change(torch.tensor(times)).tolist()) for name, change in OTHER_TIMESTEPS.items()},
        "of the next step": (*times[1:], 0.0),
        "of the step before": (*times[:1], *times[:-1]),
    }.items():
        yield Candidate(
            cause="timesteps",
            message=f"with timesteps {name}",
            remedy="feed the transformer the timesteps of its own step, as the scheduler has them, and capture these",
            inputs=(replace(inputs, timesteps=others),),
        )
    if stack.own is None or "shift" not in stack.family.pipeline.scheduler.config:
        return
    own = own_shift(stack.family, stack.latent_shape)

    def shifted(shift: float) -> Inputs:
        found = with_shift(stack.family, stack.places, stack.latent_shape, shift)
        if found is None:
            return inputs
        return replace(inputs, sigmas=found.sigmas, timesteps=found.timesteps)

    yield Candidate(
        cause="wrong_shift",
        message="with a schedule of shift {value:.4g}, where another was captured: the model's own is "
        f"{own:.4g}",
        remedy="make the schedule of both stacks from the model's own scheduler, and capture that of the engine",
        about="schedule",
        number=Number(
            inputs=shifted,
            starts=tuple(own * factor for factor in (1.0, 0.8, 1.25, 0.65, 1.5, 0.5, 2.0, 1 / 3, 3.0)),
            low=SHIFTS[0],
            high=SHIFTS[1],
        ),
    )


def _of_other_lengths(stack: Stack) -> Iterator[Hypothesis]:
    """Schedules of the model with one step less or more, in place of the sigmas, of the timesteps, or of both."""
    inputs, total = stack.captured, len(stack.captured.timesteps)
    if stack.own is None or total != stack.places[-1]:  # longer steps, which have no such length
        return
    spacing = spacing_of(stack.family, inputs.sigmas, stack.latent_shape)
    for count in (total - 1, total + 1):
        if count < 1:
            continue
        table = schedule(stack.family, range(count + 1), stack.latent_shape, spacing)
        if table is None:
            continue
        # As long as the captured ones: where they lack a step, their last value stands for it.
        sigmas = (*table.sigmas, *inputs.sigmas[-1:])[: total + 1]
        timesteps = (*table.timesteps, *table.timesteps[-1:])[:total]
        of_steps = f"of a schedule of {count} steps, where {total} were captured"
        for message, cause, others in (
            (f"with the sigmas {of_steps}", "other_schedule", replace(inputs, sigmas=sigmas)),
            (f"with the timesteps {of_steps}", "timesteps", replace(inputs, timesteps=timesteps)),
            (
                f"with sigmas and timesteps {of_steps}",
                "other_schedule",
                replace(inputs, sigmas=sigmas, timesteps=timesteps),
            ),
        ):
            yield Candidate(
                cause=cause,
                message=message,
                remedy="make one schedule, of one number of steps, for sampling and scoring, for sigmas and timesteps",
                inputs=(others,),
                about="schedule",
            )
