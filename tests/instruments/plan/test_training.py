"""Predicted memory against what torch really allocates."""

from dataclasses import replace

import pytest
import torch

from flowcorr.config import load
from flowcorr.config.schema import LoraConfig
from flowcorr.correction import OFF
from flowcorr.instruments.plan.architecture import find_architecture
from flowcorr.instruments.plan.sharding import computed, of_rank
from flowcorr.instruments.plan.training import trace_training
from tests.instruments.plan.allocation import allocated

SMALL = {
    "actor": {"micro_batch_size": 4, "mini_batches": 1},
    "rollout": {"prompts_per_step": 2, "n": 4, "same_initial_noise": False},
}


WHOLE = {  # GB: weights with adapter, peaks of recompute and of the first update
    "sd35_medium_ocr_lora": (5.2, 5.95, 8.36),
    "qwen_image_ocr_lora_rollout_corr": (42.8, 44.9, 54.0),
    "flux_dev_pickscore_lora": (25.4, 26.5, 30.8),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", WHOLE)
def test_few_blocks_of_real_models_tell_what_whole_models_were_measured_to_need(recipe):
    """Traced with all blocks: before the optimizer's state, and without older gradients."""
    config = load(recipe)
    training = trace_training(config, find_architecture(config.model.path))
    vae = 0.254e9 if "qwen" in recipe else 0.168e9
    loaded = training.weights + vae + (training.gradients if config.actor.ema else 0)
    peaks = (loaded, loaded + training.recompute.peak, loaded + training.backward.peak)
    assert [peak / 1e9 for peak in peaks] == [pytest.approx(value, rel=0.01) for value in WHOLE[recipe]]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_is_what_torch_allocates_for_the_embedded_model(
    make_config, make_run, checkpointing, autocast
):
    sections = {
        **SMALL,
        "actor": {**SMALL["actor"], "gradient_checkpointing": checkpointing, "autocast": autocast},
        "model": {"path": "tiny_ocr", "lora": no_adapter() if autocast else LoraConfig()},
    }
    config = make_config(**sections)
    training = of_rank(trace_training(computed(config), find_architecture("tiny_ocr")), config, 1)
    run = make_run(**sections)
    batch = run.batch()
    one = batch.rollout.select(slice(0, 4))
    run.actor.update(batch, OFF, training_step=1)  # makes the optimizer's state
    run.actor.optimizer.adamw.zero_grad()
    recompute = allocated(lambda: run.actor.log_probs(one))
    update = allocated(lambda: run.actor.update(batch, OFF, training_step=2))
    predicted = training.recompute.peak + training.gathered_forward
    assert predicted == pytest.approx(recompute, rel=0.12 if autocast else 0.05)
    # Autocast's copies of weights are counted for all blocks, and torch frees some of them earlier.
    predicted = training.gradients + training.backward.peak + training.gathered
    assert predicted == pytest.approx(update, rel=0.12 if autocast else 0.05)
    state = sum(value.nbytes for value in run.actor.optimizer.adamw.state().values() if value.dim())
    assert training.moments == pytest.approx(state, rel=0.01)
    assert training.gradients == sum(parameter.nbytes for parameter in run.actor.weights.parameters.values())


@pytest.mark.filterwarnings("ignore:model.dtype=bfloat16 trains all weights")
def test_the_reference_of_kl_counts_with_all_of_its_blocks():
    keys = ("model.lora.rank=0", "model.lora.alpha=32", "model.lora.targets=null", "actor.micro_batch_size=1")
    architecture = find_architecture("stabilityai/stable-diffusion-3.5-medium")
    plain, with_kl = (
        trace_training(
            load(
                "sd35_medium_ocr_lora",
                (*keys, "actor.gradient_checkpointing=false", f"actor.kl_coef={weight}"),
            ),
            architecture,
        )
        for weight in (0, 0.1)
    )
    # Forwards one pass, backwards two.
    assert with_kl.backward.flops / plain.backward.flops == pytest.approx(4 / 3, rel=0.02)


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_a_quantized_base_takes_what_torch_allocates(make_config, make_run, quantization):
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    sections = {**SMALL, "model": {"path": "tiny_ocr", "quantization": quantization}}
    architecture = find_architecture("tiny_ocr")
    training = trace_training(make_config(**sections), architecture)
    plain = trace_training(make_config(**SMALL, model={"path": "tiny_ocr"}), architecture)
    run = make_run(**sections)
    transformer = run.actor.weights.transformer
    held = sum(tensor.nbytes for tensor in (*transformer.parameters(), *transformer.buffers()))
    assert training.weights == held
    assert training.numbers == plain.numbers == plain.transformer / 4
    assert training.largest == plain.largest
    batch = run.batch()
    run.actor.update(batch, OFF, training_step=1)
    run.actor.optimizer.adamw.zero_grad()
    one = batch.rollout.select(slice(0, 4))
    recompute = allocated(lambda: run.actor.log_probs(one))
    update = allocated(lambda: run.actor.update(batch, OFF, training_step=2))
    assert training.recompute.peak == pytest.approx(recompute, rel=0.05)
    predicted = training.gradients + max(training.backward.peak, training.step.peak)
    assert predicted == pytest.approx(update, rel=0.05)


@pytest.mark.quantized
def test_dequantizing_takes_time_and_the_memory_of_one_layer(make_config):
    architecture = find_architecture("tiny_ocr")
    plain, quantized = (
        trace_training(
            make_config(**SMALL, model={"path": "tiny_ocr", "quantization": kind}), architecture
        ).recompute
        for kind in ("none", "nf4")
    )
    assert quantized.flops == plain.flops
    assert quantized.kernels > plain.kernels
    assert quantized.moved > plain.moved
    assert 0 <= quantized.peak - plain.peak <= 4 * 9 * 96 * 96


def test_a_micro_batch_of_another_size_needs_what_one_predicts_for_it(make_config):
    config, architecture = make_config(**SMALL), find_architecture("tiny_ocr")
    four = trace_training(config, architecture)
    eight = trace_training(replace(config, actor=replace(config.actor, micro_batch_size=8)), architecture)
    assert eight.backward.peak == pytest.approx(2 * four.backward.peak, rel=0.03)


def test_full_fine_tuning_holds_gradients_and_moments_of_all_weights(make_config):
    config = make_config(**SMALL, model={"path": "tiny_ocr", "lora": no_adapter()})
    training = trace_training(config, find_architecture("tiny_ocr"))
    assert training.adapter == 0
    assert training.moments == pytest.approx(2 * training.gradients, rel=0.01)
    assert 0.95 < training.gradients / training.transformer <= 1  # buffers are not trained


def test_moments_in_8_bits_take_what_bitsandbytes_allocates(make_config, make_run):
    pytest.importorskip("bitsandbytes")
    model = {"path": "tiny_ocr", "max_sequence_length": 8, "lora": no_adapter()}
    training = trace_training(make_config(**SMALL, model=model), find_architecture("tiny_ocr"))
    sections = {**SMALL, "actor": {**SMALL["actor"], "optimizer": "adamw_8bit"}}
    run = make_run(**sections, model=model)
    run.actor.update(run.batch(), OFF, training_step=1)
    entries = run.actor.optimizer.adamw.inner.state.values()
    shared = {"qmap1", "qmap2"}  # one table of codes for all weights
    held = sum(
        value.nbytes
        for entry in entries
        for key, value in entry.items()
        if isinstance(value, torch.Tensor) and key not in shared
    )
    assert training.moments_8bit == held < 0.3 * training.moments


def no_adapter():
    return LoraConfig(rank=0)
