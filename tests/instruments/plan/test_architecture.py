"""The configurations of a pipeline's components."""

import pytest

from flowcorr.config.families import FAMILIES
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.architecture import Architecture, find_architecture, find_clip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_class_of_a_pipeline_tells_its_family(name):
    index = {"_class_name": FAMILIES[name].pipeline_class}
    assert Architecture(path="x", model_index=index, configs={}).family == name


def test_a_shallow_pipeline_keeps_each_kind_of_block():
    transformer = {"num_layers": 24, "dual_attention_layers": tuple(range(13)), "width": 64}
    deep = Architecture(path="x", model_index={}, configs={"transformer": transformer})
    shallow = deep.shallow.configs["transformer"]
    assert shallow == {"num_layers": 6, "dual_attention_layers": (0, 1, 2), "width": 64}


def test_folders_without_a_configuration_are_named(tmp_path):
    with pytest.raises(ConfigError, match="is not a diffusers pipeline"):
        find_architecture(str(tmp_path))
    with pytest.raises(ConfigError, match="has no configuration"):
        find_clip(str(tmp_path))
