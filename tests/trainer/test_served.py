"""Evaluations with the adapter on the unquantized base, beside those on the quantized one that trains it."""

import pytest
import torch

from flowcorr import trainer
from flowcorr.errors import BackendError
from flowcorr.trainer.evaluate import evaluate
from flowcorr.trainer.setup import build_run
from tests.trainer.runs import records, small_config

BOTH = ("model.quantization=int8", "trainer.eval_on=both")


def scores(metrics, prefix):
    """An evaluation's metrics under a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    "quantization", ["int8", pytest.param("nf4", marks=pytest.mark.quantized)], ids=["int8", "nf4"]
)
def test_served_scores_are_those_of_the_checkpoint_on_the_unquantized_base(tmp_path, quantization):
    keys = (f"model.quantization={quantization}", "trainer.eval_on=both", "actor.ema=0.5", "actor.lr=0.01")
    trainer.train(small_config(*keys, "trainer.total_steps=2"), tmp_path / "run")
    last = records(tmp_path / "run")[-1]
    served = scores(last, "eval/served/")
    trained = {name: value for name, value in scores(last, "eval/").items() if "served" not in name}
    assert served.keys() == trained.keys()
    for expected, key in ((served, "none"), (trained, quantization)):
        only = (f"model.quantization={key}", "trainer.eval_on=trained")
        found = trainer.evaluate_run(tmp_path / "run", which="last", overrides=only)[1].metrics
        assert scores(found, "eval/") == pytest.approx(expected)
    assert served != pytest.approx(trained)


def test_the_base_is_loaded_once_and_the_trained_scores_stay():
    run, prompts = build_run(small_config(*BOTH))
    assert run.served is None
    first = evaluate(run, prompts.heldout).metrics
    served = run.served
    assert evaluate(run, prompts.heldout).metrics == first
    assert run.served is served
    run.config = small_config("model.quantization=int8")
    assert evaluate(run, prompts.heldout).metrics.items() < first.items()


def test_a_base_that_does_not_fit_names_the_key(monkeypatch):
    run, prompts = build_run(small_config(*BOTH))

    def full(self, place):
        if place == run.actor.device:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self

    monkeypatch.setattr(type(run.actor.weights.transformer), "to", full)
    with pytest.raises(BackendError, match=r" 0\.\d GB .*: set trainer\.eval_on=trained"):
        evaluate(run, prompts.heldout)
