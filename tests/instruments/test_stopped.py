"""The screen of a stopped run names the part, the evidence and the ways on."""

import json

import pytest

from flowcorr.errors import RolloutFault
from flowcorr.health.finding import Finding
from flowcorr.instruments.stopped import stopped_run
from flowcorr.trainer.run_folder import resume_command


def fault(*metrics, step=25):
    findings = [
        Finding(
            level="serious", cause=metric, sentence="it is broken", numbers={"metric": metric}, fault=True
        )
        for metric in metrics
    ]
    return RolloutFault("stopped", step=step, findings=findings)


@pytest.fixture
def folder(tmp_path):
    """A run with replays at steps 1, 10 and 20, and checkpoints of steps 10 and 24."""
    for step in (10, 24):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    replayed = {"rollout_corr/replay/window": 1e-4}
    records = [{"step": step} | (replayed if step in (1, 10, 20) else {}) for step in range(1, 25)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_the_screen_has_the_findings_and_the_ways_on(folder):
    report = stopped_run(fault("rollout/std_error"), folder)
    assert (report.level, report.causes()) == ("serious", ["rollout/std_error"])
    assert "step 25" in report.verdict
    assert report.fact("saved") == 24
    assert report.fact("resume") == resume_command(folder)
    assert report.fact("go_on") == "trainer.on_fault=warn"
    assert report.fact("last_replay") is None


def test_a_fault_that_replays_alone_can_see_may_be_older(folder):
    for metric in ("rollout_corr/replay/after", "rollout_corr/residual/path_after"):
        report = stopped_run(fault(metric), folder)
        assert report.fact("last_replay") == 20
        assert any("step_000010" in fact.text for fact in report.facts)


@pytest.mark.parametrize(
    ("metrics", "step"),
    [
        (["rollout_corr/replay/decode"], 25),  # every step decodes an image
        (["rollout_corr/replay/after", "rollout/std_error"], 25),  # an equality of the same step
        (["rollout_corr/replay/after"], 21),  # a replay in the step before
    ],
)
def test_a_fault_of_this_step_is_not(metrics, step, folder):
    assert stopped_run(fault(*metrics, step=step), folder).fact("last_replay") is None


def test_without_a_replay_before_it_every_step_may_have_learned_it(folder):
    (folder / "metrics.jsonl").unlink()
    report = stopped_run(fault("rollout_corr/residual/path_after"), folder)
    assert report.fact("last_replay") == 0
