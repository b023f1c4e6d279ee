"""The report on a plan: levels, remedies and numbers, on GPUs of different sizes."""

import json
from dataclasses import replace

import pytest

from flowcorr.config import load
from flowcorr.health.finding import as_overrides
from flowcorr.instruments.page import as_json
from flowcorr.instruments.plan.answers import MARGIN
from flowcorr.instruments.plan.devices import GPUS
from flowcorr.instruments.plan.estimate import FP8, OFFLOAD, plan_of
from flowcorr.instruments.plan.report import report_of

H100 = GPUS["h100-80gb"]


@pytest.fixture
def tiny(traces):
    return plan_of(traces, load("tiny_jpeg_lora"), gpu=H100)


def on_gpu(made, memory, **changes):
    return report_of(replace(made, gpu=replace(H100, memory=memory), **changes))


def finding_of(report, cause):
    return [finding for finding in report.findings if finding.cause == cause][-1]


@pytest.mark.parametrize(
    ("room", "level"), [(0.9, "serious"), (1.0, "warning"), (1.12, "warning"), (1.14, "healthy")]
)
def test_the_verdict_is_on_the_trainer(tiny, room, level):
    report = on_gpu(tiny, room * tiny.memory.trainer)
    assert (report.findings[0].level, report.findings[0].sentence) == (level, report.verdict)
    assert report.fact("fits") == (level == "healthy")


def test_a_micro_batch_that_is_too_large_gets_the_largest_that_fits(tiny):
    found = finding_of(report_of(replace(tiny, largest_micro_batch=3)), "micro_batch")
    assert (found.level, found.keys) == ("warning", "actor:\n  micro_batch_size: 3\n")
    none = on_gpu(tiny, 1e6, largest_micro_batch=0)
    assert finding_of(none, "micro_batch").level == "serious"
    assert "model.lora.rank" in none.findings[0].remedy


def test_a_change_that_helps_is_named(tiny):
    peak = 0.5 * tiny.memory.trainer
    less = replace(tiny.memory, phases=dict.fromkeys(tiny.memory.phases, peak))
    found = on_gpu(tiny, 1.2 * peak, changes={OFFLOAD: less}).findings[0]
    assert as_overrides(found.keys) == OFFLOAD
    assert load("tiny_jpeg_lora", [OFFLOAD]).model.offload_text_encoders


def test_no_key_is_needed_beside_a_smaller_micro_batch_that_fits(tiny):
    update = tiny.memory.phases["update"]
    other = max(peak for name, peak in tiny.memory.phases.items() if name != "update")
    assert max(tiny.memory.with_one_sample, other) < 0.9 * update
    same = {OFFLOAD: tiny.memory}
    found = on_gpu(tiny, 0.9 * update * MARGIN, changes=same, largest_micro_batch=4)
    assert found.findings[0].keys == ""
    assert as_overrides(finding_of(found, "micro_batch").keys) == "actor.micro_batch_size=4"


@pytest.mark.parametrize(("phase", "helps"), [("evaluate", True), ("sample", True), ("reward", False)])
def test_a_smaller_batch_is_a_remedy_where_sampling_does_not_fit(tiny, phase, helps):
    """Beside the encoding of prompts, which may need more than all else."""
    room = MARGIN * tiny.memory.trainer
    peaks = {**tiny.memory.phases, phase: 2 * room, "encode": 3 * room}
    made = replace(tiny, memory=replace(tiny.memory, phases=peaks))
    found = on_gpu(made, room, changes={}).findings[0]
    assert ("rollout.batch_size" in found.remedy) is helps


@pytest.mark.parametrize(
    ("engine", "shared", "changes", "levels", "keys"),
    [
        (0.0, None, {}, {"engine_memory": "note"}, ""),
        (1e9, None, {}, {"engine_memory": "healthy"}, ""),
        (1e9, 3e9, {}, {"shared_memory": "healthy"}, ""),
        (1e9, 9e11, {}, {"shared_memory": "warning"}, ""),
        (9e11, None, {FP8: 1e9}, {"engine_memory": "serious"}, FP8),
        (9e11, 9e11, {}, {"engine_memory": "serious", "shared_memory": "warning"}, ""),
    ],
)
def test_an_engine_of_its_own_is_weighed_alone_and_beside_the_trainer(
    tiny, engine, shared, changes, levels, keys
):
    made = replace(tiny, memory=replace(tiny.memory, engine=engine, shared=shared), engine_changes=changes)
    _, _, *found = report_of(made).findings
    assert {one.cause: one.level for one in found} == levels
    assert as_overrides(found[0].keys) == keys


def test_the_report_has_the_numbers(tiny):
    report = json.loads(as_json(report_of(tiny)))
    assert report["facts"]["step_seconds"] == pytest.approx(tiny.seconds())
    assert report["facts"]["memory"]["phases"] == pytest.approx(tiny.memory.phases)
    rows = {row["phase"]: row for row in report["tables"]["phases"]}
    assert [*rows][:2] == ["load", "encode"]
    assert [*rows][-1] == "step"
    assert rows["update"]["peak"] == pytest.approx(tiny.memory.phases["update"])
