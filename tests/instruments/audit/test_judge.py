"""The report on a gap."""

from dataclasses import replace

import pytest
from instruments.gaps import D, normal_gap

from flowcorr.config import load
from flowcorr.health.finding import Finding
from flowcorr.health.setting import Setting
from flowcorr.instruments.audit.facts import Facts
from flowcorr.instruments.audit.judge import report_of
from flowcorr.instruments.gap_table import Gap

SETTING = Setting.of(load("tiny_ocr_lora"))


def report_on(terms, *, older_weights=None, faults=()):
    gap = Gap.of(terms, SETTING)
    return report_of("gap", gap, Facts.of(gap, older_weights=older_weights), faults=faults)


def fault(cause):
    return Finding(level="serious", cause=cause, sentence=f"{cause} is wrong", reason="it is")


def test_the_numbers_and_the_advice_are_those_of_the_gap():
    report = report_on(normal_gap(0.02))
    assert report.fact("joint_nats") == pytest.approx(D * 0.02**2)
    assert (report.fact("mode"), report.level, report.findings[0].cause) == ("decoupled", "warning", "gap")
    assert report.verdict == report.findings[0].sentence
    assert [table.name for table in report.tables] == ["steps", "scales"]


def test_without_a_size_there_is_neither_advice_nor_scales():
    report = report_on(replace(normal_gap(0.02), num_elements=None))
    assert [finding.cause for finding in report.findings] == ["num_elements"]
    assert [table.name for table in report.tables] == ["steps"]


@pytest.mark.parametrize(("cause", "hidden"), [("one_step", True), ("non_finite", False)])
def test_a_fault_comes_first_and_may_hide_the_gap(cause, hidden):
    report = report_on(normal_gap(0.02), faults=[fault(cause)])
    assert (report.verdict, report.findings[0].cause) == (f"{cause} is wrong", cause)
    assert ("gap" in [finding.cause for finding in report.findings]) != hidden
    assert (report.fact("mode") is None) == hidden


def test_older_weights_are_held_against_bypass():
    small = normal_gap(1e-6)
    assert report_on(small).fact("mode") == "bypass"
    assert report_on(small, older_weights=True).fact("mode") == "decoupled"
