"""Checks a model family's adapter against its diffusers pipeline's own call."""

from __future__ import annotations

from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.findings import failed, passed, skipped

REMEDY = "mend the named method of {place}; flowcorr.models.compare_with_pipeline repeats this comparison"


def check_adapter(exam: Exam) -> Finding | None:
    """The finding on `Exam.adapter`; None if the stacks were handed over without it."""
    family, result = exam.actor.family, exam.adapter
    if result is None:
        return None
    if isinstance(result, str):
        return skipped(f"not compared with the pipeline's own call: {result}")
    if not result.differences:
        guided = ", with guidance and without" if result.guided else ""
        return passed(
            f"schedule, velocities{guided} and decoded images are those of {family.pipeline_class}'s own call",
            value=result.velocity_gap,
            pixels=result.pixel_gap,
        )
    first = result.differences[0]
    return failed(
        "; ".join(difference.sentence for difference in result.differences),
        REMEDY.format(place=family.place()),
        value=first.value,
        limit=first.limit,
        parts=[difference.part for difference in result.differences],
    )
