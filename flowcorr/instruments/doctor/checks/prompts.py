"""The checks of prompts and reference images: compare embeddings, and name the inputs that fit the engine's steps."""

from __future__ import annotations

from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.exam import Exam, largest_gap
from flowcorr.instruments.doctor.findings import failed, judged, passed
from flowcorr.instruments.doctor.other_inputs import explanation, named
from flowcorr.instruments.doctor.trials import REFERENCES
from flowcorr.instruments.gap_words import percent

EMBEDDING_TOLERANCE = 2e-2  # relative: rounding to bfloat16 costs at most 4e-3, another word 0.9


def check_embeddings(exam: Exam) -> Finding:
    conditioning, gaps = exam.trials.base.rollout.sample_conditioning(), {}
    remedy = (
        "use the same text encoders, prompts, negative prompt and model.max_sequence_length on both sides"
    )
    for name, expected in exam.trials.conditioning.items():
        if name not in conditioning or conditioning[name].shape != expected.shape:
            shape = list(conditioning[name].shape) if name in conditioning else None
            return failed(
                f"{name} is {shape or 'no value'} in the engine and {list(expected.shape)} here",
                remedy,
                field=name,
                engine_shape=shape,
                shape=list(expected.shape),
            )
        difference = (conditioning[name].double() - expected.to(conditioning[name].device).double()).norm()
        gaps[name] = float(difference / expected.double().norm().clamp(min=1e-12))
    name, worst = max(gaps.items(), key=lambda item: item[1])
    finding = judged(
        worst,
        EMBEDDING_TOLERANCE,
        "prompt embeddings agree",
        f"the engine's {name} differs by {percent(worst)}",
        remedy,
        field=name,
    )
    return finding if finding.level == "serious" else explained(exam, "embeddings") or finding


def explained(exam: Exam, check: str) -> Finding | None:
    """A failure if other inputs explain the gap, and this check is the one that asks about them."""
    reason = explanation(exam)
    if reason is None or reason.evidence is None or reason.candidate.cause != check:
        return None
    text = f"the steps fit {reason.candidate.message}, {reason.evidence.text}"
    samples, count = exam.trials.base.samples_off(), exam.trials.base.rollout.num_samples
    some = len(samples) < count
    return failed(
        f"{text}; it is {named(samples)} of {count} alone" if some else text,
        REMEDIES[check],
        value=reason.evidence.value,
        limit=reason.evidence.threshold,
        samples=samples if some else None,
        **reason.candidate.numbers,
    )


def check_references(exam: Exam) -> Finding | None:
    """Whether the engine's transformer sees the reference images as the actor's does; None without any."""
    if REFERENCES not in exam.trials.conditioning:
        return None
    finding = explained(exam, "references") or lies_with(
        exam,
        REFERENCES,
        "the reference images: other pixels, latents, order or places of their tokens, or text embeddings without them",
        REMEDIES["references"],
    )
    return finding or passed("the steps fit the reference images")


def lies_with(exam: Exam, prefix: str, inputs: str, remedy: str) -> Finding | None:
    """A failure if the gap exceeds the precision's, and disappears once both sides leave out some inputs."""
    plain, gap = exam.trials.withheld.get(prefix), exam.trials.base.velocity_gap()
    if plain is None or gap <= largest_gap(exam.usual_gap):
        return None
    rest = plain.velocity_gap()
    if rest > exam.usual_gap or (evidence := exam.explains(1 - (rest / gap) ** 2)) is None:
        return None
    return failed(
        f"velocities differ by {percent(gap)}, and by {percent(rest)} where both sides go without: the engine has "
        f"other inputs of {inputs}",
        remedy,
        value=evidence.value,
        limit=evidence.threshold,
        fits="unknown",
    )


_RETURNED = (
    "compare the conditioning that enters the engine's transformer with Rollout.conditioning, by value"
)
REMEDIES = {
    "embeddings": f"{_RETURNED} and length",
    "references": f"{_RETURNED} and order, and the places (img_ids, img_shapes) of the reference images' tokens",
    "guidance": f"{_RETURNED}: the negative prompt's is under negative_*, and sampling.negative_prompt is its text",
}
