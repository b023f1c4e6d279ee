"""Weights sharded over two ranks: their dtypes, and what each rank holds."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from flowcorr.config import ModelConfig
from flowcorr.config.schema import LoraConfig
from flowcorr.correction import OFF
from flowcorr.models import load_family
from flowcorr.models.base import repeated_blocks
from flowcorr.rollout.vllm_omni.probe import actor_probe
from flowcorr.workers.rollout import shipped_velocity
from tests.conftest import small_config, start_run

FULL = {"lora": LoraConfig(rank=0)}


def scores(run):
    """Samples, their log-probs under the run's actor, and the dtypes that a layer of a block computes with."""
    seen = set()

    def note(layer, inputs, output):
        seen.update((layer.weight.dtype, inputs[0].dtype, output.dtype))

    handle = repeated_blocks(run.actor.weights.transformer)[0].attn.to_q.register_forward_hook(note)
    rollout = run.sample()
    log_probs = run.actor.log_probs(rollout).log_probs
    handle.remove()
    return rollout, log_probs, seen


def on_ranks():
    """What one rank sees of weights that are sharded, computed with in bfloat16, and trained once."""
    run = start_run(
        small_config(
            model=FULL, rollout={"dtype": "bfloat16"}, actor={"fsdp": True, "autocast": True, "kl_coef": 0.1}
        )
    )
    whole = sum(weight.numel() for weight in run.actor.weights.parameters.values())
    conditioning = {
        name: rows.to(run.family.dtype) if rows.is_floating_point() else rows
        for name, rows in run.conditioning.items()
    }
    run = replace(run, conditioning=conditioning)
    rollout, log_probs, seen = scores(run)
    run.actor.update(run.batch(rollout), OFF, training_step=1)
    weights = run.actor.weights
    models = (weights.transformer, weights.reference)
    return {
        "rollout": rollout,
        "log_probs": log_probs,
        "computed": seen,
        "held": [sum(weight.to_local().numel() for weight in model.parameters()) / whole for model in models],
        "sharded": all(isinstance(weight, DTensor) for model in models for weight in model.parameters()),
        "gradients": {weight.grad.dtype for weight in weights.parameters.values()},
        "shared": run.engine.shared,
        "synced": len(weights.for_engine().tensors),
    }


@pytest.fixture(scope="module")
def ranks(two_ranks):
    return two_ranks.call(on_ranks)


def test_each_rank_holds_a_shard_of_all_weights_and_of_the_reference(ranks):
    for rank in ranks:
        assert rank["sharded"]
        assert rank["held"] == [pytest.approx(0.5, abs=0.01)] * 2


def test_sharded_weights_compute_in_bfloat16_and_are_trained_in_float32(ranks):
    for rank in ranks:
        assert rank["computed"] == {torch.bfloat16}
        assert rank["gradients"] == {torch.float32}


def test_sharded_weights_score_as_a_transformer_in_bfloat16_does(ranks):
    run = start_run(small_config(model=FULL))
    for weight in run.family.transformer.parameters():  # and not its buffers, which nobody gathers
        weight.data = weight.data.bfloat16()
    for rank in ranks:
        expected = run.actor.log_probs(rank["rollout"]).log_probs
        torch.testing.assert_close(rank["log_probs"], expected, rtol=1e-6, atol=1e-6)


def test_an_engine_shares_sharded_weights_and_gets_no_copy(ranks):
    assert all(rank["shared"] and rank["synced"] == 0 for rank in ranks)


def adapted():
    """The share of the frozen weights that one rank holds, and the adapters of both before and after an update."""
    run = start_run(small_config(actor={"fsdp": True}))
    weights = run.actor.weights
    frozen = [weight for weight in weights.transformer.parameters() if not weight.requires_grad]
    before = weights.snapshot().tensors
    run.actor.update(run.batch(), OFF, training_step=1)
    return {
        "held": sum(weight.to_local().numel() for weight in frozen)
        / sum(weight.numel() for weight in frozen),
        "whole": not any(isinstance(weight, DTensor) for weight in weights.parameters.values()),
        "before": before,
        "after": weights.snapshot().tensors,
        "exported": weights.exported(),
    }


def test_an_adapter_on_sharded_weights_is_whole_and_the_same_on_each_rank(two_ranks):
    ranks = two_ranks.call(adapted)
    for rank in ranks:
        assert rank["held"] == pytest.approx(0.5, abs=0.01)
        assert rank["whole"]
        assert all(torch.equal(rank["after"][name], value) for name, value in ranks[0]["after"].items())
        assert rank["exported"].keys() == ranks[0]["exported"].keys()
    assert any(not torch.equal(ranks[0]["after"][name], value) for name, value in ranks[0]["before"].items())


def test_a_transformer_that_will_be_sharded_is_loaded_in_host_memory():
    family = load_family(ModelConfig(path="tiny_ocr"), "meta", transformer_on_host=True)
    places = {name: next(part.parameters()).device.type for name, part in modules(family).items()}
    assert places.pop("transformer") == "cpu"
    assert set(places.values()) == {"meta"}


def modules(family):
    return {
        name: part for name, part in family.pipeline.components.items() if isinstance(part, torch.nn.Module)
    }


def probed():
    """The velocity that goes to Ray workers with the weights, as this rank has it."""
    run = start_run(small_config(actor={"fsdp": True}))
    probe = actor_probe(run.family, run.config, run.actor.weights.snapshot().tensors)
    return probe.start, shipped_velocity(probe, run.actor.weights.for_engine(), run.config)


def test_every_rank_of_sharded_weights_computes_the_probe_of_ray_workers(two_ranks):
    for start, velocity in two_ranks.call(probed, timeout=120):
        torch.testing.assert_close(
            velocity, start, rtol=1e-5, atol=1e-5
        )  # B is 0: the adapter changes nothing
