"""New weights reach the real engine, in every way, and a sync that fails is an error."""

from dataclasses import replace

import pytest
import torch

from flowcorr.errors import BackendError
from flowcorr.rollout.vllm_omni import adapter

pytestmark = [pytest.mark.vllm_omni, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("way", ["lora_tensors", "lora_path"])
def test_an_adapter_reaches_the_engine(stack, way):
    stack.engine.weight_sync = way
    before = stack.sample()
    stack.stir(seed=3)
    stale = stack.mismatch(stack.sample()).mean()
    stack.sync()
    rollout = stack.sample()
    assert rollout.policy_versions.unique().tolist() == [stack.actor.weights.version]
    assert stack.mismatch(rollout).mean() <= 1e-6 < 1e-4 < stale
    assert not torch.equal(rollout.window.next_latents, before.window.next_latents)


@pytest.mark.parametrize("rank", [4, 0])
def test_merged_weights_reach_the_engine(start, rank):
    stack = start("sd3", lora={"rank": rank}, rollout={"engine": {"weight_sync": "merged"}})
    before = stack.sample()
    stack.stir(scale=0.02 if rank else 0.005)
    assert stack.mismatch(before).mean() > 1e-5
    stack.sync()
    rollout = stack.sample()
    assert rollout.policy_versions.unique().tolist() == [1]
    assert stack.mismatch(rollout).mean() <= 1e-6


def test_weights_that_the_engine_does_not_know_are_an_error(stack, monkeypatch):
    stack.stir()
    real = adapter.peft_tensors

    def misnamed(tensors, layer_suffix):
        return {
            name.replace("attn.to_q", "attention.query"): row
            for name, row in real(tensors, layer_suffix).items()
        }

    monkeypatch.setattr(adapter, "peft_tensors", misnamed)
    with pytest.raises(BackendError, match=r"weight_sync=merged.*flowcorr_adapter.*incomplete"):
        stack.sync()


def test_a_sync_that_changes_nothing_is_an_error(stack, monkeypatch):
    old = adapter.peft_tensors(stack.actor.weights.snapshot().tensors, ("", ""))
    stack.stir()
    monkeypatch.setattr(adapter, "peft_tensors", lambda tensors, layer_suffix: old)
    with pytest.raises(BackendError, match=r" \d+ of \d+ tensors .*weight_sync=merged"):
        stack.sync()


@pytest.mark.parametrize("weight_sync", ["lora_tensors", "merged"])
def test_weights_whose_digests_agree_are_not_accused(weight_sync, start, monkeypatch, caplog):
    """Another velocity than the actor's warns, once; a first sync of merged weights has no digest to compare with."""
    stack = start("sd3", rollout={"engine": {"weight_sync": weight_sync}})
    stack.stir()
    stack.sync()
    probe = stack.engine._probe
    opposite = replace(probe, velocity=lambda weights: -probe.velocity(weights))
    monkeypatch.setattr(stack.engine, "_probe", opposite)
    with caplog.at_level("WARNING", logger="flowcorr"):
        for seed in (1, 2):
            stack.stir(seed=seed)
            stack.sync()
    warned = [record for record in caplog.records if record.levelname != "INFO"]
    assert [record.name.split(".")[0] for record in warned] == ["flowcorr"]
    monkeypatch.setattr(stack.engine, "_own_digest", None)
    stack.stir(seed=3)
    if weight_sync == "lora_tensors":
        stack.sync()
    else:
        with pytest.raises(BackendError, match="effect: .*other weights: .*weight_sync=lora_tensors"):
            stack.sync()


def in_bfloat16(start, weight_sync):
    """An engine whose rounding hides a small change of the weights from its velocity."""
    stack = start("sd3", dtype="bfloat16", rollout={"engine": {"weight_sync": weight_sync}})
    stack.stir()
    stack.sync()
    return stack


def test_a_sync_that_is_ignored_is_an_error_however_small(start, monkeypatch):
    stack = in_bfloat16(start, "lora_tensors")
    stack.sample()
    rpc = stack.engine.client.rpc
    monkeypatch.setattr(
        stack.engine.client,
        "rpc",
        lambda method, **given: {} if method == "flowcorr_adapter" else rpc(method, **given),
    )
    request = stack.engine._lora_request()
    monkeypatch.setattr(stack.engine, "_lora_request", lambda: request)
    stack.stir(scale=1e-5)
    with pytest.raises(BackendError, match=r" \d+ of \d+ tensors .*weight_sync=merged"):
        stack.sync()


def test_parameters_that_are_not_loaded_are_an_error(start, monkeypatch):
    stack = in_bfloat16(start, "merged")

    def all_but_one(weights, dtype):
        yield {name: value for name, value in weights if "blocks.0.attn.to_q" not in name}

    monkeypatch.setattr(adapter, "buckets", all_but_one)
    stack.stir(scale=1e-4, seed=1)
    with pytest.raises(BackendError, match="engine's parameters .*weight_sync=lora_tensors"):
        stack.sync()


def test_requests_that_name_another_adapter_are_an_error(stack, monkeypatch):
    monkeypatch.setattr(stack.engine, "_lora_request", lambda: None)
    with pytest.raises(BackendError, match=r" \d+ of \d+ tensors .*weight_sync=merged"):
        stack.sample()
