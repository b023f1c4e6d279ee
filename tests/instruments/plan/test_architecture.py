"""The configurations of a pipeline's components."""

import json
import shutil

import pytest

from flowcorr.config.families import FAMILIES
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.architecture import (
    Architecture,
    find_architecture,
    find_clip,
    local_architecture,
)
from flowcorr.models.paths import EMBEDDED


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
    with pytest.raises(ConfigError, match=rf"^model\.path='{tmp_path}' .*/model_index\.json"):
        find_architecture(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"reward's path='{tmp_path}' .*/config\.json"):
        find_clip(str(tmp_path))


@pytest.fixture
def pipeline(tmp_path):
    """`pipeline(**parts)` is the embedded pipeline's folder with more components: their classes, by their names."""
    folder = shutil.copytree(EMBEDDED["tiny_ocr"], tmp_path / "model")

    def add(**parts):
        index = folder / "model_index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | parts))
        return folder

    return add


@pytest.mark.parametrize(
    ("name", "kind", "file"),
    [
        ("processor", "Qwen2VLProcessor", "preprocessor_config.json"),
        ("processor", "Qwen2VLProcessor", "processor_config.json"),
        ("text_processor", "Qwen2VLProcessor", "video_preprocessor_config.json"),
        ("feature_extractor", "CLIPImageProcessor", "preprocessor_config.json"),
        ("image_processor", "CLIPImageProcessor", None),
        ("tokenizer_4", "T5Tokenizer", "spiece.model"),
    ],
)
def test_components_without_a_model_have_files_of_their_own(pipeline, name, kind, file):
    plain = find_architecture("tiny_ocr").configs
    folder = pipeline(**{name: ["transformers", kind], "safety_checker": [None, None]})
    if file is not None:
        (folder / name).mkdir()
        (folder / name / file).write_text("{}")
    assert find_architecture(str(folder)).configs == plain
    assert local_architecture(str(folder)).configs == plain


def test_any_other_component_with_a_configuration_is_read(pipeline):
    folder = pipeline(image_encoder=["transformers", "CLIPVisionModel"])
    (folder / "image_encoder").mkdir()
    (folder / "image_encoder/config.json").write_text('{"hidden_size": 8}')
    assert find_architecture(str(folder)).configs["image_encoder"] == {"hidden_size": 8}


@pytest.mark.parametrize("name", ["transformer", "vae", "text_encoder_2", "scheduler"])
def test_the_configuration_of_a_model_that_is_missing_is_named(pipeline, name):
    folder = pipeline()
    shutil.rmtree(folder / name)
    with pytest.raises(ConfigError, match=rf"^model\.path='{folder}' .*/{name}/(scheduler_)?config\.json"):
        local_architecture(str(folder))
