"""Runs whose Ray workers are faulty: one is taken out and the run goes on as without it; a fault of all stops it."""

import os
from pathlib import Path

import pytest

from flowcorr import trainer
from flowcorr.config import Engine
from flowcorr.errors import RolloutFault
from flowcorr.rollout import InProcessEngine
from flowcorr.trainer.events import read_events
from tests.trainer.runs import assert_same_weights, checkpoints, records, small_config
from tests.trainer.test_fault import FAULTS

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("ray_cluster")]
STEP = 3
RAY = (
    "rollout.placement=ray",
    "rollout.num_workers=2",
    "rollout.worker_resources={num_cpus: 0.5}",
    "rollout.timeout=600",
    "rollout.replay_every=1",  # of each image, so that its step sees what the decoder does
    "trainer.total_steps=3",
    "trainer.eval_every=0",
)


class Breaking(InProcessEngine):
    """It breaks at a training step, in the process that claims a file of `rollout.engine.claimed` first."""

    def __init__(self, options, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.options = options

    def sample(self, conditioning, groups, *, training_step, **options):
        rollout = super().sample(conditioning, groups, training_step=training_step, **options)
        return FAULTS[self.options["fault"]](rollout) if training_step >= STEP and self.broken() else rollout

    def broken(self):
        if "fault" not in self.options:
            return False
        for claim in self.options["claims"]:
            if not Path(claim).exists():
                Path(claim).write_text(str(os.getpid()))
            if Path(claim).read_text() == str(os.getpid()):
                return True
        return False


def build(config, family, *, merge, base, probe):
    settings = (config.rollout, config.sampling)
    return Breaking(
        config.rollout.engine, family, *settings, seed=config.trainer.seed, merge=merge, base=base
    )


ENGINE = Engine(build="tests.trainer.test_faulty_workers:build", shares_weights=True)
NAME = "rollout.name=tests.trainer.test_faulty_workers:ENGINE"


def engine(cause, *claims):
    return f"rollout.engine={{fault: {cause}, claims: [{', '.join(map(str, claims))}]}}"


def taken_out(folder):
    return [event for event in read_events(folder / "events.jsonl") if event["kind"] == "worker_faulty"]


@pytest.fixture(scope="module")
def clean(ray_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean") / "run"
    trainer.train(small_config(NAME, *RAY), folder)
    return folder


@pytest.mark.parametrize("cause", ["seeded_noise", "replay_decode"])
def test_a_run_without_its_faulty_worker_is_the_run_that_never_had_it(cause, clean, tmp_path):
    trainer.train(small_config(NAME, *RAY, engine(cause, tmp_path / "claim")), tmp_path / "run")
    assert records(tmp_path / "run") == records(clean)
    assert_same_weights(tmp_path / "run", clean, STEP)
    (event,) = taken_out(tmp_path / "run")
    assert (event["step"], event["pid"]) == (STEP - 1, int((tmp_path / "claim").read_text()))
    assert cause in event["error"]


def test_a_fault_of_all_workers_stops_the_run(tmp_path):
    claims = (tmp_path / "first", tmp_path / "second")
    with pytest.raises(RolloutFault) as caught:
        trainer.train(small_config(NAME, *RAY, engine("log_prob_error", *claims)), tmp_path / "run")
    assert caught.value.step == STEP
    assert records(tmp_path / "run")[-1]["step"] == STEP - 1
    assert checkpoints(tmp_path / "run")[-1] == f"step_{STEP - 1:06d}"
