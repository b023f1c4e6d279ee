"""Pipelines from their configurations alone."""

import diffusers
import pytest
import torch

from flowcorr.config import ModelConfig, load, recipe_names
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.architecture import Architecture, find_architecture
from flowcorr.instruments.plan.pipelines import family_class
from flowcorr.models import load_family


@pytest.mark.parametrize("path", sorted({load(name).model.path for name in recipe_names()}))
def test_models_of_recipes_are_found_without_the_hub(path):
    architecture = find_architecture(path)
    assert {"transformer", "vae"} <= architecture.configs.keys()
    assert any(name.startswith("text_encoder") for name in architecture.configs)
    assert (
        family_class(architecture, ModelConfig(path=path)).pipeline_class in architecture.model_index.values()
    )


def test_an_embedded_model_has_the_configuration_of_its_folder():
    config = ModelConfig(path="tiny_ocr")
    architecture, family = find_architecture("tiny_ocr"), load_family(config)
    assert architecture.configs["transformer"]["num_layers"] == family.transformer.config.num_layers
    assert type(family) is family_class(architecture, config)


@pytest.mark.parametrize("path", sorted({load(name).model.path for name in recipe_names()}))
def test_every_block_of_a_recipes_model_is_counted(path):
    architecture = find_architecture(path)
    with torch.device("meta"):
        kind = getattr(diffusers, architecture.model_index["transformer"][1])
        few, all_blocks = (
            kind.from_config(each.configs["transformer"]) for each in (architecture.shallow, architecture)
        )

    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    assert architecture.whole(few, count) == count(all_blocks)


def test_a_pipeline_of_no_family_is_named():
    architecture = Architecture(path="x", model_index={"_class_name": "OtherPipeline"}, configs={})
    with pytest.raises(ConfigError, match=r"model\.path='x' .*OtherPipeline, .*StableDiffusion3Pipeline,"):
        family_class(architecture, ModelConfig(path="x"))
