"""Scripts and files of other trainers."""

import json

import pytest

from flowcorr.translate import translate
from tests.translate.configs import GRPO, factory_yaml, loaded, omni_yaml


@pytest.fixture
def omni(tmp_path):
    """`omni(*overrides)` is the recipe of verl-omni's configuration with overrides, and its text."""

    def make(*overrides, **options):
        path = tmp_path / "resolved.yaml"
        path.write_text(omni_yaml(*overrides), encoding="utf-8")
        text = translate(str(path), **options)
        return loaded(tmp_path, text), text

    return make


@pytest.fixture
def omni_file(tmp_path):
    """The path of verl-omni's configuration."""
    path = tmp_path / "resolved.yaml"
    path.write_text(omni_yaml(), encoding="utf-8")
    return str(path)


@pytest.fixture
def grpo(tmp_path):
    """The path of flow_grpo's configuration, as its `to_json_best_effort()` writes it."""
    path = tmp_path / "general_ocr_sd3.json"
    path.write_text(json.dumps(GRPO), encoding="utf-8")
    return str(path)


@pytest.fixture
def factory(tmp_path):
    """`factory(**changes)` is the recipe of a YAML of Flow-Factory with changes, and its text."""

    def make(**changes):
        path = tmp_path / "factory.yaml"
        path.write_text(factory_yaml(**changes), encoding="utf-8")
        text = translate(str(path))
        return loaded(tmp_path, text), text

    return make
