"""A run's times beside its plan: on numbers made by hand, and of a real run of the embedded model."""

import json
import shutil
from dataclasses import replace

import pytest
from diagnostics.run_folders import write_run
from instruments.html_pages import Page

from flowcorr.cli import main
from flowcorr.config import load, to_yaml
from flowcorr.diagnostics.measured import beside, measure_apart
from flowcorr.diagnostics.report.page import write_report
from flowcorr.plan.answers import Memory, Phase, Plan
from flowcorr.plan.devices import GPUS, Utilisation
from flowcorr.trainer.loop import train

H100 = GPUS["h100-80gb"]
PEAKS = dict.fromkeys(
    ("load", "encode", "idle", "sample", "decode", "reward", "recompute", "update_without_samples",
     "update_a_sample", "sync"), 1e9,
)  # fmt: skip
MEMORY = Memory(**PEAKS, update=4e9, engine=0.0, engine_sleeps=False, may_share=False)


def plan_of(**changes):
    phases = (
        Phase(name="sample", where="trainer", peak=1e9, flops=6e12, seconds=2.0),
        Phase(name="decode", where="trainer", peak=1e9, flops=2e12, seconds=1.0),
        Phase(name="update", where="trainer", peak=4e9, flops=9.89e12, seconds=5.0),
        Phase(name="sync", where="trainer", peak=1e9, seconds=0.5),
    )
    plan = Plan(
        title="", gpu=H100, utilisation=Utilisation(), ranks=2, images=48, phases=phases, memory=MEMORY,
        micro_batch=8, mini_batch=48, bypass=True,
    )  # fmt: skip
    return replace(plan, **changes)


def record(scale):
    times = {"rollout": 4.0, "update": 10.0, "sync": 0.4, "old_log_prob": 0.0, "step": 16.0}
    values = {f"timing/{name}": scale * seconds for name, seconds in times.items()}
    return {**values, "perf/images_per_second": 6.0 / scale, "perf/max_memory_gb": 3.5}


STEPS = [record(scale) for scale in (0.9, 1.0, 3.0)]


def test_each_phase_that_was_timed_stands_beside_its_plan():
    run = beside(plan_of(), load("tiny_jpeg_lora", ["model.dtype=bfloat16"]), STEPS)
    assert [phase.name for phase in run.phases] == ["rollout", "update", "sync", "step"]
    rollout, update, sync, step = run.phases
    assert (rollout.planned, rollout.measured, rollout.tflops) == (3.0, 4.0, 2.0)
    assert update.share == pytest.approx(9.89e12 / 10.0 / H100.bf16) == pytest.approx(0.001)
    assert (sync.measured, sync.tflops) == (0.4, None)
    assert (step.planned, step.measured) == (8.5, 16.0)
    assert (run.planned_images, run.measured_images) == (96 / 8.5, 6.0)
    assert (run.planned_memory, run.measured_memory) == (4e9, 3.5 * 2**30)


def test_waiting_for_workers_is_no_arithmetic():
    run = beside(plan_of(overlaps=True), load("tiny_jpeg_lora"), STEPS)
    assert run.phases[0].tflops is None
    assert run.phases[1].tflops == pytest.approx(0.989)


def test_a_share_above_the_peak_tells_that_the_peak_is_not_known():
    slow = replace(H100, float32=1e11)
    run = beside(plan_of(gpu=slow), load("tiny_jpeg_lora"), STEPS)
    assert [phase.share for phase in run.phases] == [None] * 4
    assert run.phases[0].tflops == 2.0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    size = ["rollout.prompts_per_step=2", "rollout.n=2", "sampling.num_inference_steps=4"]
    train(load("tiny_jpeg_lora", [*size, "trainer.total_steps=2", "trainer.eval_every=0"]), folder)
    return folder


def on_h100(run, tmp_path):
    """The run, as if an H100 had made it."""
    folder = tmp_path / "on_h100"
    shutil.copytree(run, folder)
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    noted = {"device": "NVIDIA H100 80GB HBM3", "memory": 8.5e10}
    path.write_text(
        "".join(json.dumps(event | (noted if "device" in event else {})) + "\n" for event in events)
    )
    return folder


def test_the_report_of_a_run_on_a_cpu_shows_no_plan(run, tmp_path):
    assert measure_apart(run) is None
    assert "Planned beside measured" not in Page(write_report([run], tmp_path / "report.html")).text


@pytest.mark.system
def test_the_report_of_a_run_on_a_gpu_shows_planned_beside_measured(run, tmp_path):
    page = Page(write_report([on_h100(run, tmp_path)], tmp_path / "report.html"))
    assert "Planned beside measured" in page.text
    assert "images a second:" in page.text.lower()
    page.check_alone()


def test_a_run_without_a_device_is_not_counted(tmp_path):
    assert measure_apart(write_run(tmp_path / "old")) is None


@pytest.mark.parametrize(
    ("options", "message"), [(["rollout.n=4"], "is a run's folder"), (["--gpus", "2"], "is a run")]
)
def test_a_run_is_planned_as_it_was(run, options, message, capsys):
    assert main(["plan", str(run), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_one_step_has_nothing_to_compare(tmp_path, capsys):
    folder = tmp_path / "short"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(load("tiny_jpeg_lora")))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **record(1.0)}) + "\n")
    assert main(["plan", str(folder)]) == 2
    assert "fewer than two training steps" in capsys.readouterr().err
