"""Text inputs are those that the family's own `encode` returns, on pipelines of the real classes."""

from dataclasses import replace

import pytest
import torch
from tiny_pipelines import FAMILIES, build_tiny_qwen_image, build_tiny_z_image

from flowcorr.config.schema import Config, ModelConfig, SamplingConfig
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.architecture import find_architecture
from flowcorr.instruments.plan.pipelines import family_class
from flowcorr.instruments.plan.text_inputs import encoder_inputs, text_inputs, with_longest_prompt
from flowcorr.models import Guidance, ModelFamily, load_family
from flowcorr.models.qwen_image import QwenImage
from flowcorr.models.sd3 import SD3
from tests.prompts import prompts_of


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("tiny", FAMILIES.values(), ids=FAMILIES)
def test_text_inputs_have_the_shapes_that_the_family_encodes(tmp_path, tiny, guided):
    scale = tiny.guidance if guided else {}
    path = str(tiny.build(tmp_path / "model"))
    config = Config(model=ModelConfig(path=path, max_sequence_length=8), sampling=SamplingConfig(**scale))
    family = load_family(config.model)
    encoded = family.encode(prompts_of(["cat", "dog"], images=tiny.images), Guidance(**scale))
    references = encoded.pop("references", None)
    architecture = replace(find_architecture(path), num_references=tiny.images)
    inputs = text_inputs(architecture, type(family), config)
    assert inputs.shapes == {name: tuple(rows.shape[1:]) for name, rows in encoded.items()}
    if references is not None:
        shapes = family.reference_shapes(family.latent_shape(None, None), tiny.images)
        assert shapes == {"references": tuple(references.shape[1:])}
    kept = [rows[0].nbytes for name, rows in encoded.items() if not name.startswith("negative_")]
    assert inputs.nbytes(torch.float32) == sum(kept)


def test_only_padded_text_is_as_long_as_the_longest_prompt_may_be():
    config = Config(model=ModelConfig(max_sequence_length=256))
    texts = ["cat", "a sign that says STOP"]

    def longest(family, path, prompts):
        return with_longest_prompt(find_architecture(path), family, config, prompts).model.max_sequence_length

    assert longest(QwenImage, "Qwen/Qwen-Image", texts) == 32
    assert longest(QwenImage, "Qwen/Qwen-Image", ["x" * 900]) == 256
    assert longest(SD3, "tiny_ocr", texts) == 256


@pytest.mark.parametrize(("build", "tokens"), [(build_tiny_qwen_image, 34 + 16), (build_tiny_z_image, 256)])
def test_encoders_read_prompts_padded_to_the_longest_or_to_the_limit(tmp_path, build, tokens):
    path = str(build(tmp_path / "model"))
    config = Config(model=ModelConfig(path=path, max_sequence_length=256))
    architecture = find_architecture(path)
    family = family_class(architecture, config.model)
    assert encoder_inputs(architecture, family, config, ["cat"]).tokens == {"text_encoder": tokens}


def test_a_family_of_ones_own_is_named_as_unknown():
    class Other(ModelFamily):
        name = "other"

    with pytest.raises(ConfigError, match=rf" {', '.join(FAMILIES)}; Other\.text_shapes "):
        text_inputs(find_architecture("tiny_ocr"), Other, Config())
