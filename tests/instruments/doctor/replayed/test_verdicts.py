"""Verdicts of several training steps, and their exit code."""

import pytest

from flowcorr.instruments.doctor.replayed.verdicts import ReplayReport, Verdict, worst


def verdict(part, status, step=0):
    return Verdict(
        part=part, status=status, step=step, message=status, cause="noise_reused" if status == "FAIL" else ""
    )


def test_the_worst_of_each_part_is_kept_in_order():
    found = worst(
        [
            verdict("decode", "PASS"),
            verdict("adapter", "SKIP"),
            verdict("decode", "FAIL", step=1),
            verdict("adapter", "PASS", step=1),
            verdict("decode", "FAIL", step=2),
        ]
    )
    assert [(one.part, one.status, one.step) for one in found] == [
        ("adapter", "PASS", 1),
        ("decode", "FAIL", 1),
    ]


def test_inputs_of_steps_that_differ_are_not_judged_by_others():
    found = worst(
        [
            verdict("before", "PASS"),
            verdict("adapter", "PASS"),
            verdict("noise", "PASS"),
            verdict("before", "WARN", step=3),
            verdict("prompts", "PASS", step=3),
            verdict("prompts", "SKIP"),
        ]
    )
    assert {one.part: one.status for one in found} == {
        "noise": "PASS",
        "before": "WARN",
        "prompts": "PASS",
        "adapter": "SKIP",
    }
    assert found[-1].message == "PASS at training step 0; not judged at 3, where the replay differs"


@pytest.mark.parametrize(
    ("statuses", "code"), [(("PASS", "SKIP"), 0), (("PASS", "WARN"), 1), (("WARN", "FAIL"), 2)]
)
def test_the_exit_code(statuses, code):
    verdicts = [verdict("noise", status) for status in statuses]
    report = ReplayReport(folder="x", model="y", steps=[0], verdicts=verdicts)
    assert report.exit_code == code
    assert report.causes == ["noise_reused"] * (code == 2)
    assert report.to_mapping()["exit_code"] == code
