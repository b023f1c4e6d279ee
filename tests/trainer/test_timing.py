"""The split of a step."""

import pytest
import torch

from flowcorr.trainer.timing import PHASES, Stopwatch


def test_each_phase_is_told_and_timed():
    told = []
    watch = Stopwatch(told.append, torch.device("cpu"))
    for phase in ("rollout", "update", "rollout"):
        with watch(phase):
            sum(range(1000))
    values = watch.metrics(num_images=8).compute()
    assert told == ["rollout", "update", "rollout"]
    assert set(values) == {f"timing/{phase}" for phase in PHASES} | {"timing/step", "perf/images_per_second"}
    assert values["timing/rollout"] > 0
    assert values["timing/old_log_prob"] == 0
    assert sum(values[f"timing/{phase}"] for phase in PHASES) <= values["timing/step"]
    assert values["perf/images_per_second"] == pytest.approx(8 / values["timing/step"])
