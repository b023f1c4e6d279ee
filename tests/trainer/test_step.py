"""What a training step does with rewards that are not as they should be."""

import numpy as np
import pytest
import torch

from flowcorr.errors import BackendError
from flowcorr.trainer.setup import build_run
from flowcorr.trainer.step import drop_failed_groups, train_step
from tests.rollouts import make_rollout
from tests.trainer.runs import small_config

GROUPS = torch.tensor([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("failed", "kept"), [([], [0, 1, 2, 3, 4, 5]), ([2], [0, 1, 4, 5]), ([0, 1, 5], [2, 3])]
)
def test_a_failed_sample_takes_its_group_along(failed, kept):
    mask = np.zeros(6, dtype=bool)
    mask[failed] = True
    assert drop_failed_groups(make_rollout(6, group_ids=GROUPS), mask).tolist() == kept


def test_no_group_left_is_an_error():
    with pytest.raises(BackendError, match="a sample failed in every group of this step"):
        drop_failed_groups(
            make_rollout(6, group_ids=GROUPS), np.array([True, False, False, True, True, True])
        )


def test_a_step_keeps_neither_copies_of_samples_nor_gradients(monkeypatch):
    """Beside a model that fills the GPU, a step's conditioning and latents are gigabytes, and so are gradients."""
    run, _ = build_run(small_config())
    run.engine.sync(run.actor.weights.snapshot())
    sample, update, seen = run.engine.sample, run.actor.update, []
    monkeypatch.setattr(
        run.engine, "sample", lambda *args, **key: seen.append(drawn := sample(*args, **key)) or drawn
    )
    monkeypatch.setattr(
        run.actor,
        "update",
        lambda batch, *args, **key: seen.append(batch.rollout) or update(batch, *args, **key),
    )
    train_step(run, 1, lambda _: None)
    run.close()
    sampled, learned = seen
    assert learned.window.latents.data_ptr() == sampled.window.latents.data_ptr()
    assert learned.images is None
    assert [name for name, weight in run.actor.weights.parameters.items() if weight.grad is not None] == []
