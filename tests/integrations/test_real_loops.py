"""Faults in other trainers' real loops, named from their dumps. They run from source trees, on one CPU process:

tests/integrations/real_loops/install.sh VENV
FLOW_GRPO=PATH FLOW_FACTORY=PATH VENV/bin/python -m pytest -m real_loops tests/integrations/test_real_loops.py \
    -k "flow_grpo or flow_factory"

tests/integrations/install.sh VENV PATH     # verl-omni's own
VERL_OMNI=PATH VENV/bin/python -m pytest -m real_loops tests/integrations/test_real_loops.py -k verl_omni

A run takes 15 to 30 seconds, and there are forty-eight. Limits were set on seeds 1 and 2. verl-omni's loop is that of
its sync v1 trainer, from the agent loop to the optimizer; its Ray workers, its transfer queue and vllm-omni's engine,
whose release that it pins needs a GPU, are left out: see `real_loops/run_verl_omni.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import build_pipeline
import pytest
from integrations.real_loops import planted_flow_factory, planted_flow_grpo, planted_verl_omni
from tiny_pipelines import build_tiny_sd3

from flowcorr import dumps
from flowcorr.instruments.audit.dumped import audit_folder
from flowcorr.instruments.doctor import examine_dump
from flowcorr.instruments.page import exit_code

pytestmark = [pytest.mark.real_loops, pytest.mark.filterwarnings("ignore")]

FOLDER = Path(__file__).parent / "real_loops"
LOOPS = {
    "flow_grpo": planted_flow_grpo.FAULTS,
    "flow_factory": planted_flow_factory.FAULTS,
    "verl_omni": planted_verl_omni.FAULTS,
}
WINDOW = {"flow_grpo": 3, "flow_factory": 2, "verl_omni": 2}  # steps that are trained
CLEAN_SEEDS = (42, 7, 11, 13)
TOKENS = 77  # of flow_grpo's CLIP, fixed in its code


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny model, and prompts."""
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


def run(loop, work, folder, fault, seed):
    if loop.upper() not in os.environ:
        pytest.fail(f"tests marked real_loops need the path of a source tree of {loop} in {loop.upper()}")
    environment = os.environ | {"WORK": str(work), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"run_{loop}.py"), str(folder), "2", fault, str(seed)],
        env=environment,
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize(("loop", "fault"), [(loop, fault) for loop in LOOPS for fault in LOOPS[loop]])
def test_a_fault_of_anothers_loop_is_named(loop, fault, work, tmp_path):
    report = examine_dump(run(loop, work, tmp_path / "run", fault, seed=42), str(work / "model"))
    assert set(report.causes()) == {LOOPS[loop][fault][0]}


@pytest.mark.parametrize("seed", CLEAN_SEEDS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_clean_run_of_anothers_loop_is_clean(loop, seed, work, tmp_path):
    """flow_grpo never trains its last step; half of the terms are scored after an update; neither is a gap."""
    folder = run(loop, work, tmp_path / "run", "clean", seed)
    report = examine_dump(folder, str(work / "model"))
    assert (report.causes(), exit_code(report)) == ([], 0)
    audited = audit_folder(folder)
    assert (audited.fact("num_steps"), audited.findings[0].cause) == (WINDOW[loop], "gap")
    assert audited.fact("joint_nats") == pytest.approx(0, abs=1e-4)
    assert all(row["rejected_terms"] == 0 for row in audited.table("presets"))
    for path in dumps.files(folder).values():
        terms = dumps.load(path)
        assert terms.bypass == (loop != "verl_omni")  # which recomputes old log-probs
        assert not terms.bypass or terms.before_update.any()
