"""Faults in another trainer's real loop, named from its dump. It runs from a source tree, on one CPU process:

tests/integrations/real_loops/install.sh VENV
FLOW_GRPO=PATH VENV/bin/python -m pytest -m real_loops tests/integrations

A run takes 15 seconds, and there are sixteen. Limits were set on seeds 1 and 2.
"""

import os
import subprocess
import sys
from pathlib import Path

import build_pipeline
import pytest
from integrations.real_loops.planted import FAULTS
from tiny_pipelines import build_tiny_sd3

from flowcorr import dumps
from flowcorr.diagnostics.audit.dumped import audit_folder
from flowcorr.diagnostics.doctor.replayed.examine import examine_dump
from flowcorr.diagnostics.lab import replay_run

pytestmark = [pytest.mark.real_loops, pytest.mark.filterwarnings("ignore")]

RUN = Path(__file__).parent / "real_loops" / "run_flow_grpo.py"
CLEAN_SEEDS = (42, 7, 11, 13)
TOKENS = 77  # of flow_grpo's CLIP, fixed in its code


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny model, and prompts."""
    if "FLOW_GRPO" not in os.environ:
        pytest.fail("tests marked real_loops need the path of a flow_grpo source tree in FLOW_GRPO")
    folder = tmp_path_factory.mktemp("work")
    before, build_pipeline.MAX_TOKENS = build_pipeline.MAX_TOKENS, TOKENS
    try:
        build_tiny_sd3(folder / "model")
    finally:
        build_pipeline.MAX_TOKENS = before
    (folder / "prompts").mkdir()
    for split in ("train", "test"):
        (folder / "prompts" / f"{split}.txt").write_text("cat\ndog\nsun\nbee\n")
    return folder


def run(work, folder, fault, seed):
    environment = os.environ | {"WORK": str(work), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, str(RUN), str(folder), "2", fault, str(seed)],
        env=environment,
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_flow_grpos_loop_is_named(fault, work, tmp_path):
    report = examine_dump(run(work, tmp_path, fault, seed=42), str(work / "model"))
    assert set(report.causes) == {FAULTS[fault][0]}


@pytest.mark.parametrize("seed", CLEAN_SEEDS)
def test_a_clean_run_of_flow_grpo_is_clean(seed, work, tmp_path):
    """Its last step is never trained, and half of its terms are scored after an update; neither is a gap."""
    folder = run(work, tmp_path, "clean", seed)
    report = examine_dump(folder, str(work / "model"))
    assert (report.causes, report.exit_code) == ([], 0)
    audited = audit_folder(folder)
    assert (audited.num_steps, audited.diagnoses, audited.joint_nats) == (3, (), 0)
    assert all(
        found.outcome is None or found.outcome.rejected_terms == 0 for found in replay_run(folder).replays
    )
    assert all(dumps.load(path).before_update.any() for path in dumps.files(folder).values())
