"""Where a model is."""

import pytest

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.architecture import find_architecture
from flowcorr.models import EMBEDDED, load_family, resolve_path


def test_an_embedded_name_is_a_folder_and_other_paths_stay(tmp_path):
    assert resolve_path("tiny_ocr") == str(EMBEDDED["tiny_ocr"])
    assert resolve_path("some/model") == "some/model"
    assert resolve_path(str(tmp_path)) == str(tmp_path)


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_path("~/model") == str(tmp_path / "model")


@pytest.mark.parametrize("path", ["~/missing", "/missing/model", "./missing", "../missing"])
def test_a_folder_that_is_not_there_is_named_without_asking_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for find in (lambda name: load_family(ModelConfig(path=name)), find_architecture):
        with pytest.raises(ConfigError, match=rf"^model\.path='{path}': no such folder;.* tiny_ocr$"):
            find(path)
