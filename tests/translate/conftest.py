"""Scripts and files of other trainers."""

import pytest

from flowcorr.translate import translate
from tests.translate.configs import GRPO, SCRIPT, factory_yaml, loaded


@pytest.fixture
def omni(tmp_path):
    """`omni(*overrides)` is the recipe of the script with more overrides, and its text."""

    def make(*overrides):
        script = tmp_path / "run.sh"
        script.write_text(SCRIPT.format(" ".join(overrides)), encoding="utf-8")
        text = translate(str(script))
        return loaded(tmp_path, text), text

    return make


@pytest.fixture
def omni_script(tmp_path):
    """The path of the script."""
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(""), encoding="utf-8")
    return str(script)


@pytest.fixture
def grpo(tmp_path):
    """A file of flow_grpo; its configuration is `get`."""
    path = tmp_path / "grpo.py"
    path.write_text(GRPO, encoding="utf-8")
    return path


@pytest.fixture
def factory(tmp_path):
    """`factory(**changes)` is the recipe of a YAML of Flow-Factory with changes, and its text."""

    def make(**changes):
        path = tmp_path / "factory.yaml"
        path.write_text(factory_yaml(**changes), encoding="utf-8")
        text = translate(str(path))
        return loaded(tmp_path, text), text

    return make
