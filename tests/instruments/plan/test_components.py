"""Models around the transformer, without values."""

import pytest

from flowcorr.config import RewardTerm
from flowcorr.instruments.plan.architecture import find_architecture
from flowcorr.instruments.plan.components import trace_clip, trace_decoder, trace_text_encoders
from flowcorr.instruments.plan.pipelines import family_class
from flowcorr.instruments.plan.text_inputs import text_inputs
from flowcorr.models import load_family


def size_of(*modules):
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())


def test_the_decoder_weighs_what_it_weighs_and_takes_few_images_at_a_time(make_config):
    config = make_config()
    architecture = find_architecture("tiny_ocr")
    few, many = trace_decoder(config, architecture, 2, 10**6)
    assert few.weights == size_of(load_family(config.model).pipeline.vae)
    assert few.batch == 2 < many.batch < 10**6
    assert few.scaled(4).flops == 2 * few.work.flops
    assert few.scaled(4).peak == few.work.peak  # one batch at a time


def test_guidance_leaves_the_text_encoders_of_a_prompt_as_they_are(make_config):
    config, guided = make_config(), make_config(sampling={"guidance_scale": 3.0})
    architecture = find_architecture("tiny_ocr")
    family = family_class(architecture, config.model)

    def measured(config):
        inputs = text_inputs(architecture, family, config)
        return trace_text_encoders(config, architecture, inputs, prompts=4)[False]

    plain, with_negative = measured(config), measured(guided)
    pipeline = load_family(config.model).pipeline
    encoders = [pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3]
    found = [encoder for encoder in encoders if encoder is not None]
    assert size_of(*found) <= plain.weights
    assert plain.weights == pytest.approx(size_of(*found), rel=0.05)  # T5's tied embeddings count once
    assert with_negative == plain


def test_offloaded_text_encoders_hold_one_layer(make_config):
    config, architecture = make_config(), find_architecture("tiny_ocr")
    inputs = text_inputs(architecture, family_class(architecture, config.model), config)
    found = trace_text_encoders(config, architecture, inputs, prompts=4)
    here, offloaded = found[False], found[True]
    pipeline = load_family(config.model).pipeline
    encoders = [pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3]
    layers = [
        size_of(layer) for encoder in encoders for layer in encoder.modules() if not [*layer.children()]
    ]
    assert offloaded.weights == 0
    assert here.work.peak < offloaded.work.peak < here.work.peak + 1.05 * max(layers)
    assert offloaded.work.flops == here.work.flops


@pytest.mark.parametrize(
    "term",
    [RewardTerm(name="ocr"), RewardTerm(name="pickscore", options={"device": "cpu"})],
    ids=["no model", "on the CPU"],
)
def test_rewards_beside_the_gpu_take_none_of_it(term):
    assert trace_clip(term) is None
