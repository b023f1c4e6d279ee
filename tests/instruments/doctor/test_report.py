"""The worst finding of several training steps, and the verdict on all of them."""

import pytest

from flowcorr.instruments.doctor.findings import check_of, of_check
from flowcorr.instruments.doctor.report import of_captured, worst
from flowcorr.instruments.finding import LEVELS, Finding
from flowcorr.instruments.page import exit_code


def finding(check, level, step=0):
    cause = "noise_reused" if level == "serious" else ""
    return of_check(check, Finding(level=level, cause=cause, sentence=level, numbers={"step": step}))


def test_the_worst_of_each_check_is_kept():
    found = worst(
        [
            finding("images", "healthy"),
            finding("lora", "note"),
            finding("images", "serious", step=1),
            finding("lora", "healthy", step=1),
            finding("images", "serious", step=2),
        ]
    )
    assert {(check_of(one), one.level, one.numbers["step"]) for one in found} == {
        ("lora", "healthy", 1),
        ("images", "serious", 1),
    }


def test_inputs_of_steps_that_differ_are_not_judged_by_others():
    found = worst(
        [
            finding("before", "healthy"),
            finding("lora", "healthy"),
            finding("noise", "healthy"),
            finding("before", "warning", step=3),
            finding("embeddings", "healthy", step=3),
            finding("embeddings", "note"),
        ]
    )
    assert {one.cause: one.level for one in found} == {
        "noise": "healthy",
        "before": "warning",
        "embeddings": "healthy",
        "lora": "note",
    }
    (told,) = [one for one in found if one.level == "note"]
    assert (told.numbers["judged"], told.numbers["not_judged"]) == ([0], [3])


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
    found = [finding(f"noise{place or ''}", level) for place, level in enumerate(levels)]
    report = of_captured("x", "y", [0], found, ["not captured: adapter"])
    assert (exit_code(report), report.verdict) == (code, verdict)
    assert report.causes() == ["noise_reused"] * (code == 2)
    *others, missing = report.findings
    assert [one.level for one in others] == sorted(levels, key=LEVELS.index)
    assert (missing.level, missing.cause) == ("note", "files")
