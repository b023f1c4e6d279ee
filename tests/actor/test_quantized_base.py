"""Learning under a quantized base: every pass through it computes the same, and as its dequantized weights do."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flowcorr import lora
from flowcorr.models.quantized import QuantizedLinear
from tests.actor.updates import assert_same, weights
from tests.tolerances import GRADIENTS, LOG_PROBS

INT8 = pytest.param("int8", id="int8")
NF4 = pytest.param("nf4", id="nf4", marks=pytest.mark.quantized)
BOTH = pytest.mark.parametrize("quantization", [INT8, NF4])


def quantized_layers(run):
    modules = run.actor.weights.transformer.named_modules()
    return {path: module for path, module in modules if isinstance(module, QuantizedLinear)}


def of_dequantized_weights(make_run, run):
    """A run on a plain base whose weights are the dequantized ones, with the same adapter."""
    plain = make_run(actor={"kl_coef": run.config.actor.kl_coef})
    for path, layer in quantized_layers(run).items():
        plain.actor.weights.transformer.get_submodule(path).weight.copy_(layer.dequantized(torch.float32))
    plain.actor.weights.load(run.actor.weights.snapshot().tensors)
    return plain


def codes(run):
    return {path: layer.weight.clone() for path, layer in quantized_layers(run).items()}


@pytest.fixture
def start(make_run):
    def make(quantization, **sections):
        run = make_run(model={"quantization": quantization}, **sections)
        run.stir()
        return run

    return make


@BOTH
def test_passes_with_and_without_gradients_agree_to_the_bit(start, quantization):
    run = start(quantization)
    rollout = run.sample()
    found = []
    for enabled in (False, True, False, True):
        with torch.set_grad_enabled(enabled):
            found.append(run.actor.score(rollout).log_probs)
    assert [scores.requires_grad for scores in found] == [False, True, False, True]
    assert all(torch.equal(scores, found[0]) for scores in found)


@BOTH
def test_gradient_and_log_probs_are_those_of_the_dequantized_weights(start, make_run, quantization):
    run = start(quantization)
    plain = of_dequantized_weights(make_run, run)
    batch = run.batch()
    torch.testing.assert_close(
        plain.actor.log_probs(batch.rollout).log_probs, batch.old_log_probs, **LOG_PROBS
    )
    run.update(batch)
    plain.update(batch)
    assert_same(run.gradient(), plain.gradient(), **GRADIENTS)


@BOTH
def test_an_update_moves_the_adapter_and_no_codes(start, quantization):
    run = start(quantization)
    before, batch = codes(run), run.batch()
    assert run.update(batch).compute()["actor/updates"] == 1
    after = [run.actor.log_probs(batch.rollout).log_probs for _ in range(2)]
    assert torch.equal(*after)
    assert not torch.equal(after[0], batch.old_log_probs)
    assert torch.equal(run.actor.score(batch.rollout).log_probs, after[0])
    assert all(torch.equal(layer, before[path]) for path, layer in codes(run).items())


@BOTH
@pytest.mark.parametrize("key", ["gradient_checkpointing", pytest.param("compile", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_the_gradient_stays_as_it_is_under(start, quantization, key):
    plain, other = start(quantization), start(quantization, actor={key: True})
    batch = plain.batch()
    plain.update(batch)
    other.update(batch)
    assert_same(other.gradient(), plain.gradient(), **GRADIENTS)


@BOTH
def test_the_saved_adapter_has_the_names_of_one_on_a_plain_base(start, make_run, quantization, tmp_path):
    run = start(quantization)
    plain = of_dequantized_weights(make_run, run)
    files = []
    for one, name in ((run, "quantized"), (plain, "plain")):
        one.actor.weights.save(tmp_path / name)
        files.append(load_file(tmp_path / name / "pytorch_lora_weights.safetensors"))
    assert_same(*files, rtol=0, atol=0)


@BOTH
def test_merged_weights_are_dequantized(start, make_run, quantization):
    run = start(quantization)
    plain = of_dequantized_weights(make_run, run)
    merged, expected = (dict(lora.merged_weights(one.actor.weights.transformer, {})) for one in (run, plain))
    assert_same(merged, expected, rtol=1e-6, atol=1e-7)


@BOTH
def test_the_average_is_of_the_adapter(start, quantization):
    run = start(quantization, actor={"ema": 0.5})
    before = weights(run)
    with run.actor.weights.averaged():
        assert weights(run).keys() == before.keys()
        assert any(not torch.equal(value, before[name]) for name, value in weights(run).items())
    assert_same(weights(run), before, rtol=0, atol=0)
    assert run.actor.weights.exported().keys() == lora.adapter_state(run.actor.weights.transformer).keys()


@BOTH
def test_the_reference_policy_is_the_quantized_base(start, make_run, quantization):
    run = start(quantization, actor={"kl_coef": 0.1})
    plain = of_dequantized_weights(make_run, run)
    rollout = run.sample()
    found = run.actor.scorer.reference_means(rollout)
    assert run.actor.weights.reference is run.actor.weights.transformer
    torch.testing.assert_close(found, plain.actor.scorer.reference_means(rollout), rtol=1e-5, atol=2e-5)
    assert not torch.equal(found, rollout.window.means)


@BOTH
def test_it_learns_in_bfloat16_and_under_autocast(make_run, quantization):
    """Layers take inputs of the model's dtype, and gradients of the dtype of their outputs."""
    for sections in (
        {"model": {"dtype": "bfloat16"}, "rollout": {"dtype": "bfloat16"}},
        {"actor": {"autocast": True}},
    ):
        sections["model"] = {"quantization": quantization, **sections.get("model", {})}
        run = make_run(**sections)
        run.stir()
        assert run.update(run.batch()).compute()["actor/grad_norm"] > 0
        assert all(parameter.isfinite().all() for parameter in weights(run).values())


@BOTH
def test_the_engine_of_the_process_shares_the_quantized_weights(start, quantization):
    run = start(quantization)
    rollout = run.sample()
    assert run.engine.transformer is run.actor.weights.transformer
    scores = run.actor.log_probs(rollout, with_means=True)
    torch.testing.assert_close(scores.log_probs, rollout.log_probs, **LOG_PROBS)


@BOTH
@pytest.mark.parametrize("rollout", [{"staleness": 1}, {"emulate": "int8"}, {"dtype": "bfloat16"}])
def test_an_engine_that_cannot_share_holds_the_dequantized_weights(start, quantization, rollout):
    """So that the gap is that of staleness, rounding or dtype, and not of the quantization."""
    run = start(quantization, rollout=rollout)
    run.stir(seed=1)
    layers = {
        name: module
        for name, module in run.engine.transformer.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert not any(isinstance(layer, QuantizedLinear) for layer in layers.values())
    if rollout == {"staleness": 1}:  # the weights before the last sync
        run.engine.sync(run.actor.weights.snapshot())
        sampled = run.sample()
        scores = run.actor.log_probs(sampled)
        torch.testing.assert_close(scores.log_probs, sampled.log_probs, **LOG_PROBS)
    path, layer = next(iter(quantized_layers(run).items()))
    adapted = dict(lora.merged_weights(run.actor.weights.transformer, {}))
    name = path.replace(".base_layer", "")
    off = (layers[name].weight.float() - adapted[f"{name}.weight"]).norm() / adapted[f"{name}.weight"].norm()
    assert off < {"staleness": 1e-6, "emulate": 0.02, "dtype": 4e-3}[next(iter(rollout))]
