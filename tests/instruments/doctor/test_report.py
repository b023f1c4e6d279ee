"""The worst finding of several training steps, and the verdict on all of them."""

import pytest

from flowcorr.health.finding import LEVELS, Finding
from flowcorr.instruments.doctor.findings import of_check
from flowcorr.instruments.doctor.report import of_captured, worst
from flowcorr.instruments.page import exit_code

CAUSE = "noise_reused"


def finding(check, level):
    return of_check(check, Finding(level=level, cause=CAUSE if level == "serious" else "", sentence=level))


def of_steps(*levels):
    """By training step, the findings by check, from the levels by check."""
    return {
        step: {check: finding(check, level) for check, level in of_step.items()}
        for step, of_step in enumerate(levels)
    }


def test_the_worst_of_each_check_is_kept():
    found = worst(
        of_steps(
            {"images": "healthy", "lora": "note"},
            {"images": "serious", "lora": "healthy"},
            {"images": "serious", "lora": "note"},
        )
    )
    assert [(one.cause, one.level, one.numbers["step"]) for one in found] == [
        (CAUSE, "serious", 1),
        ("lora", "healthy", 1),
    ]


def test_inputs_of_steps_that_differ_are_not_judged_by_others():
    found = worst(
        of_steps(
            {"before": "healthy", "lora": "healthy", "noise": "healthy", "embeddings": "note"},
            {"before": "warning", "embeddings": "healthy"},
        )
    )
    assert {one.cause: one.level for one in found} == {
        "noise": "healthy",
        "before": "warning",
        "embeddings": "healthy",
        "lora": "note",
    }
    (told,) = [one for one in found if one.level == "note"]
    assert (told.numbers["judged"], told.numbers["not_judged"]) == ([0], [1])


@pytest.mark.parametrize(
    ("levels", "code", "verdict"),
    [
        (("healthy", "note"), 0, "no fault found in noise"),
        (("healthy", "warning"), 1, "noise1 differs from the replay, and the cause cannot be told"),
        (("warning", "serious"), 2, "at fault: noise_reused"),
        (("note",), 0, "nothing can be told from what was captured"),
    ],
)
def test_the_verdict_and_the_exit_code_follow_from_the_findings(levels, code, verdict):
    (found,) = of_steps({f"noise{place or ''}": level for place, level in enumerate(levels)}).values()
    report = of_captured("x", "y", {0: found}, ["not captured: adapter"])
    assert (exit_code(report), report.verdict) == (code, verdict)
    assert report.causes() == [CAUSE] * (code == 2)
    *others, missing = report.findings
    assert [one.level for one in others] == sorted(levels, key=LEVELS.index)
    assert (missing.level, missing.cause) == ("note", "files")
