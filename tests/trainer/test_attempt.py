"""A training step that a fault stops; runs with Ray workers are in `test_faulty_workers`."""

from dataclasses import replace

import pytest

from flowcorr.errors import RolloutFault
from flowcorr.trainer.attempt import attempt
from flowcorr.trainer.setup import build_run
from tests.trainer.runs import small_config


def test_a_fault_of_an_engine_in_this_process_ends_the_step(monkeypatch):
    run, _ = build_run(small_config())
    run.engine.sync(run.actor.weights.snapshot())
    sample, calls = run.engine.sample, []

    def wrong(*args, **options):
        calls.append(options["training_step"])
        rollout = sample(*args, **options)
        return replace(rollout, log_probs=rollout.log_probs + 1e-3)

    monkeypatch.setattr(run.engine, "sample", wrong)
    before = run.actor.weights.snapshot()
    with pytest.raises(RolloutFault, match="log_prob_error") as caught:
        attempt(run, 1, lambda phase: None)
    run.close()
    assert (caught.value.step, calls) == (1, [1])
    assert run.actor.weights.version == before.version
