"""An update of a run that has already learned something, and what it leaves."""

import torch

from flowcorr.config.schema import LoraConfig

FULL = {"lora": LoraConfig(rank=0)}


def assert_same(first, second, **tolerance):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(
            value, second[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def weights(run):
    return run.actor.weights.snapshot().tensors


def updated(make_run, batch_of=None, **sections):
    """Gradient and metrics of one update on an on-policy batch after some training."""
    run = make_run(**sections)
    run.stir()
    batch = run.batch() if batch_of is None else batch_of(run)
    metrics = run.update(batch, training_step=1).compute()
    return run, metrics
