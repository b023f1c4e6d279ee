"""The first hour on a GPU, in tiny sizes on a CPU: every part runs, and what goes wrong is a row of the table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowcorr.instruments.plan.devices import GPUS
from tests.gpu.hour import bundle, engine
from tests.gpu.hour.machine import known_gpu
from tests.gpu.hour.parts import PARTS
from tests.gpu.hour.record import Outcome, Record, Row
from tests.gpu.pages import PAGES, rewritten

SCRIPT = Path(__file__).with_name("first_hour.py")


def first_hour(*arguments, timeout=60):
    command = [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_the_parts_are_listed_with_their_minutes(tmp_path):
    record = Record(tmp_path)
    record.outcomes["machine"] = Outcome(status="done", seconds=30)
    record.save()
    done = first_hour("--dry", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*PARTS, "all"]
    assert lines[0].endswith("done in 0.5")
    assert sum(part.minutes for part in PARTS.values()) <= 60
    assert max(part.minutes for part in PARTS.values()) <= 8


def test_a_record_can_be_gone_on_from(tmp_path):
    record = Record(tmp_path)
    rows = [
        Row(what="peak | GB", value=1.04, unit="GB", expected=1.0, within=0.05),
        Row(what="x", value=[1.0, 2e-5]),
    ]
    record.outcomes["plan"] = Outcome(
        status="failed", reason="lost\nits way", rows=rows, facts={"sd35": {"a": 1}}
    )
    record.save()
    assert Record(tmp_path).outcomes == record.outcomes
    assert len((tmp_path / "first_hour.jsonl").read_text().splitlines()) == 3  # the part and its rows
    page = (tmp_path / "first_hour.md").read_text().splitlines()
    assert page[0] == "2 rows, 1 of them with a range, 0 outside it (`look`)."
    assert page[4] == "| plan | 0 s | FAILED | lost its way |"
    assert page[10:12] == [
        "| plan | peak / GB | 1.04 GB | 1 ± 5% | ok |  |",
        "| plan | x | 1 2e-05 |  |  |  |",
    ]


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        ({"value": 1.2, "expected": 1.0, "within": 0.25}, "ok"),
        ({"value": 1.3, "expected": 1.0, "within": 0.25}, "look"),
        ({"value": 0.7, "expected": 1.0, "within": 0.25}, "look"),
        ({"value": float("nan"), "expected": 1.0, "within": 0.25}, "look"),
        ({"value": 1.3, "expected": 1.0}, ""),
        ({"value": 3, "at_most": 3}, "ok"),
        ({"value": 4, "at_most": 3}, "look"),
        ({"value": "failed", "failed": True}, "FAILED"),
    ],
)
def test_a_number_is_judged_by_what_was_promised(row, verdict):
    assert Row(what="it", **row).verdict == verdict


def test_a_part_that_cannot_run_does_not_end_the_others(tmp_path):
    parts = ["step_sd35", "correction"]
    done = first_hour("--parts", *parts, "--out", tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    outcomes = Record(tmp_path).outcomes
    assert outcomes["step_sd35"].status == "skipped"
    assert outcomes["step_sd35"].reason.startswith("needs 'sd35' of the part 'plan'")
    assert outcomes["correction"].status == "done"
    assert {row.verdict for row in outcomes["correction"].rows} == {"ok"}
    written = (tmp_path / "first_hour.jsonl").read_text()
    assert first_hour("--parts", *parts, "--out", tmp_path).returncode == 0  # nothing is due
    assert (tmp_path / "first_hour.jsonl").read_text() == written


def test_wheels_of_what_is_installed_are_left_alone(tmp_path):
    (tmp_path / "omegaconf-1.0-py3-none-any.whl").touch()
    before = list(sys.path)
    bundle.install(tmp_path)
    assert sys.path == before


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_its_record(page):
    assert rewritten(page) == page.read_text(encoding="utf-8"), "write it anew: python -m tests.gpu.pages"


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path):
    done = first_hour("--minutes", 60, "--out", tmp_path, timeout=3600)
    assert done.returncode == 0, done.stdout
    outcomes = Record(tmp_path).outcomes
    skipped = {"compiled_sd35", "compiled_qwen_image"} | (set() if engine.installed() else {"vllm_omni"})
    assert list(outcomes) == list(PARTS)
    assert {name for name, outcome in outcomes.items() if outcome.status != "done"} == skipped
    assert [row for outcome in outcomes.values() for row in outcome.rows if row.verdict == "FAILED"] == []


@pytest.mark.parametrize(
    ("name", "memory", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0e9, "h100-80gb"),
        ("NVIDIA H200", 150.1e9, "h200-141gb"),
        ("NVIDIA H20", 102.6e9, "h20-96gb"),
        ("NVIDIA A100-SXM4-80GB", 85.1e9, "a100-80gb-sxm"),
        ("NVIDIA A100-PCIE-40GB", 42.3e9, "a100-40gb-pcie"),
        ("NVIDIA GeForce RTX 4090", 25.2e9, "rtx4090-24gb"),
    ],
)
def test_a_device_is_known_by_the_name_that_torch_gives_it(name, memory, known):
    assert known_gpu(name, memory) is GPUS[known]
    assert known_gpu("NVIDIA T4", 16e9) is None
